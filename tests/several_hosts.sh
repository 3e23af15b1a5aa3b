#!/bin/sh
# One training over several hosts (hosts.sh): where its ranks are is said, what it computes does not depend on it,
# and it goes on without a host that is gone. How fast it is: bench/several_hosts.sh.
#
#   several_hosts.sh ECHELON DIRECTORY
#
# Exits 0; 77 where namespaces are not permitted, 1 where a check fails.
echelon=$1
work=$2
rate=
. "$(dirname "$0")/hosts.sh"

rm -rf "$work/records"
same_loss() {
  [ "$(loss $1)" = "$(loss $2)" ] || { echo "$1 and $2 differ in loss: $(loss $1), $(loss $2)"; exit 1; }
}

tokens=32
run tp-inside-hosts 2 2 "--map-by slot" --dp 2 --tp 2
run tp-across-hosts 2 2 "--map-by node" --dp 2 --tp 2
grep -q "2 nodes: host1 has ranks 0-1, host2 ranks 2-3\|host1 has ranks 0-1" "$work/tp-inside-hosts.err" ||
  { echo "the node map is not printed"; cat "$work/tp-inside-hosts.err"; exit 1; }
grep -q "2 of 2 tp groups leave a node" "$work/tp-across-hosts.err" ||
  { echo "no warning of tp groups that leave a node"; exit 1; }
! grep -q "leave a node" "$work/tp-inside-hosts.err" || { echo "a warning without a reason"; exit 1; }
same_loss tp-inside-hosts tp-across-hosts
run dp-int8 4 1 "" --dp 4 --compress int8
run dp-powersgd 4 1 "" --dp 4 --compress powersgd:2
run dp-one-bucket 2 1 "" --dp 2
run dp-bucket-a-layer 2 1 "" --dp 2 --bucket 1KiB
same_loss dp-one-bucket dp-bucket-a-layer
run cp-ring-of-4 4 1 "" --cp 4 --cp-kind ring
run pp 4 1 "" --pp 4
echo "the ranks of several hosts compute what they are to"

# A job that fails: every host keeps the records of its ranks, and the report says where.
start 2 2 "--map-by slot" "$echelon" train --model llama-tiny --data "$work/text" --dp 2 --tp 2 --global-batch 4 --micro-batch 1 \
  --seq-len 32 --steps 4 --threads 1 --sample 0 --log /dev/full --record "$work/records" >"$work/failed.out" 2>&1
[ $? -eq 3 ] && grep -q "flight-rank-\*.jsonl on host1 in $work/records/echelon-flight-......, on host2 in $work/records/echelon-flight-" \
  "$work/failed.out" && [ "$(ls "$work"/records/*/flight-rank-*.jsonl | wc -l)" -eq 4 ] &&
  [ "$(ls -d "$work"/records/echelon-flight-* | wc -l)" -eq 2 ] ||
  { echo "the records of two hosts are not where they are said to be"; cat "$work/failed.out"; ls -R "$work/records"; exit 1; }
echo "a job that fails says on which host the records of its ranks are"

# A host that is gone: the training goes on without it, from its last checkpoint.
touch "$work/gone-2"
rm -rf "$work/elastic"
"$work/agent" 10.77.0.1 timeout 300 "$echelon" launch --hosts 10.77.0.1:1,10.77.0.2:1 --agent "$work/agent" \
  --elastic --max-restarts 2 -- train --model llama-tiny --data "$work/text" --dp 2 --global-batch 4 \
  --micro-batch 1 --seq-len 32 --steps 8 --threads 1 --sample 0 --save-every 2 --checkpoint "$work/elastic" \
  --timeout 200 --die 1:6:forward >"$work/elastic.out" 2>&1 ||
  { echo "launch did not go on without host 2"; cat "$work/elastic.out"; exit 1; }
grep -q "1 host left; going on with --dp 1" "$work/elastic.out" &&
  grep -q "restart 1 of 2$" "$work/elastic.out" &&
  grep -q "resume  after step [2-6] of $work/elastic/step-0000000" "$work/elastic.out" &&
  [ -e "$work/elastic/step-00000008/checkpoint.json" ] ||
  { echo "launch said or did something else"; cat "$work/elastic.out"; exit 1; }
echo "host 2 is gone: launch goes on with --dp 1 from the last checkpoint"

# A host whose network is cut while it trains: it is named, mpirun is not waited for, and the training goes on.
rm -rf "$work/gone-2" "$work/cut"
"$work/agent" 10.77.0.1 timeout 300 "$echelon" launch --hosts 10.77.0.1:1,10.77.0.2:1 --agent "$work/agent" \
  --elastic --max-restarts 2 -- train --model gpt2-tiny --data "$work/text" --dp 2 --global-batch 4 \
  --micro-batch 1 --seq-len 32 --steps 300 --threads 1 --sample 0 --save-every 20 --checkpoint "$work/cut" \
  --timeout 6 >"$work/cut.out" 2>&1 &
launch=$!
while kill -0 $launch 2>/dev/null && ! [ -e "$work/cut/step-00000020" ]; do sleep 0.02; done
touch "$work/gone-2"
ip -n $id-switch link set p2 down
cut_at=$(date +%s)
while kill -0 $launch 2>/dev/null && ! grep -q "; restart" "$work/cut.out"; do sleep 0.1; done
went_on_at=$(date +%s)
wait $launch || { echo "launch did not go on without the host that was cut off"; cat "$work/cut.out"; exit 1; }
grep -q "silent since" "$work/cut.out" && grep -q "restart 1 of 2$" "$work/cut.out" &&
  [ -e "$work/cut/step-00000300/checkpoint.json" ] ||
  { echo "launch said or did something else"; cat "$work/cut.out"; exit 1; }
echo "host 2 is cut off in a run with --timeout 6: launch goes on without it after $((went_on_at - cut_at)) s"
