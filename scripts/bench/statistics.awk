# Statistics of groups of samples. Input: "GROUP VALUE" a line, sorted by group, then by value
# (sort -k1,1 -k2,2n). Output, CSV: group, count, min, mean, median, p99, max, stdev. Percentiles are
# by nearest rank over all samples, stdev is that of a sample (n - 1): as in common.hpp.
function rank(p) { return value[int((count * p + 99) / 100)] }
function flush_group(   i, mean, squares) {
  if (count == 0) return
  mean = sum / count
  for (i = 1; i <= count; i++) squares += (value[i] - mean) ^ 2
  printf "%s,%d,%.9g,%.9g,%.9g,%.9g,%.9g,%.9g\n", group, count, value[1], mean, rank(50), rank(99), value[count],
    (count > 1 ? sqrt(squares / (count - 1)) : 0)
}
$1 != group { flush_group(); group = $1; count = 0; sum = 0 }
{ value[++count] = $2 + 0; sum += $2 }
END { flush_group() }
