#!/bin/sh
# How fast one training is over several hosts of a slow network (tests/hosts.sh), laid out in several ways, and
# how much of the transfers is hidden where computation takes as long as they do: the tables of docs/cluster.md.
#
#   several_hosts.sh ECHELON LINK_OVERLAP DIRECTORY [RATE]     (the default rate is 100mbit)
echelon=$1
link_overlap=$2
work=$3
rate=${4:-100mbit}
. "$(dirname "$0")/../tests/hosts.sh"

measure() { run "$@" && printf '%-20s %8.3f s a step   loss %s\n' "$1" "$(step_seconds $1)" "$(loss $1)"; }

echo "each host sends at $rate"
# Activations of long sequences are more than the gradients of a small model.
tokens=256
measure tp-inside-hosts 2 2 "--map-by slot" --dp 2 --tp 2
measure tp-across-hosts 2 2 "--map-by node" --dp 2 --tp 2
tokens=64
measure dp-plain 4 1 "" --dp 4
measure dp-int8 4 1 "" --dp 4 --compress int8
measure dp-powersgd 4 1 "" --dp 4 --compress powersgd:2
tokens=256
measure dp-one-bucket 2 1 "" --dp 2
measure dp-bucket-a-layer 2 1 "" --dp 2 --bucket 1KiB
measure cp-ring 2 1 "" --cp 2 --cp-kind ring
measure cp-allgather 2 1 "" --cp 2 --cp-kind allgather
measure cp-ring-of-4 4 1 "" --cp 4 --cp-kind ring
measure pp 4 1 "" --pp 4

# What waits for the network, with computation that sleeps as long as the network needs.
for count in 2 4; do
  for what in ring buckets; do start $count 1 "" "$link_overlap" $what 1 || exit 1; done
done
