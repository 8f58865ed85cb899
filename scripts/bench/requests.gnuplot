# Latency of each request of a row of them. Wants: results, origin.
set datafile separator comma
file = results."/requests.csv"
stats file skip 1 using 4 nooutput
bytes = STATS_max
stats file skip 1 using ($3/1e3) nooutput
set title sprintf("Sequential READs of %d bytes in one connection (", bytes).origin.")" noenhanced
set xlabel "request"
set ylabel "latency, µs"
set yrange [0:*]
set grid lc rgb "#dddddd"
set key right top outside horizontal
plot file skip 1 using ($1+1):($3/1e3) with points pt 7 lc rgb "#0060ad" title "request", \
     STATS_median with lines lc rgb "#dd181f" lw 2 title sprintf("median %.0f µs", STATS_median)
