# Latency over size. Wants: results, rate (Gb/s), origin.
set datafile separator comma
set title "One READ of the whole size (".origin.")" noenhanced
set logscale xy
set xlabel "bytes read"
set ylabel "latency, µs"
set format x "10^{%L}"
set format y "10^{%L}"
set grid xtics ytics mxtics mytics lc rgb "#dddddd"
set key left top reverse Left spacing 1.3
set style line 1 lc rgb "#0060ad" lw 2 pt 7 ps 1.3
set style line 2 lc rgb "#dd181f" lw 2 pt 4 ps 1.5
set style line 3 lc rgb "#555555" lw 2 dt 2
set xrange [5e5:2.2e9]
file = results."/summary.csv"
plot file skip 1 using 1:($5/1e3):($5/1e3):($6/1e3) with yerrorbars ls 1 title "rdma\\_kv\\_reader: median, bar to p99", \
     file skip 1 using 1:($5/1e3) with lines ls 1 notitle, \
     file skip 1 using 1:($1/$11/1e3) with points ls 2 title "ib\\_read\\_bw, better message size: bytes / median rate", \
     x*8/(rate*1e3) with lines ls 3 title sprintf("floor of a %d Gb/s link", rate)
