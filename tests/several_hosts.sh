#!/bin/sh
# One training over several "hosts" on this machine: network namespaces behind a bridge, each sending at a
# limited rate (tc tbf), started by mpirun through an agent that enters a host's namespace. What crosses hosts
# crosses TCP.
#
#   several_hosts.sh ECHELON LINK_OVERLAP DIRECTORY [RATE]     (the default rate is 100mbit)
#
# Prints the seconds of a step for several ways to lay out the same training, and how much of the transfers is
# hidden; checks what must hold whatever the rate, and exits 0; 77 where namespaces are not permitted (the reason
# is printed), 1 where a check fails.
set -u
echelon=$1
link_overlap=$2
work=$3
rate=${4:-100mbit}
id=ech$$
hosts=4
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

clean() {
  for i in $(seq 1 $hosts); do ip netns del $id-$i 2>/dev/null; done
  ip netns del $id-switch 2>/dev/null
}
skip() { echo "skipped: $1"; clean; exit 77; }
trap clean EXIT INT TERM

command -v ip >/dev/null && command -v tc >/dev/null || skip "iproute2 is not installed"
reason=$(ip netns add $id-switch 2>&1) || skip "no network namespaces: $reason"
ip -n $id-switch link add br0 type bridge 2>/dev/null || skip "no bridge in a network namespace"
ip -n $id-switch link set br0 up
for i in $(seq 1 $hosts); do
  ip netns add $id-$i
  ip link add v$i netns $id-$i type veth peer name p$i netns $id-switch || skip "no veth devices"
  ip -n $id-$i addr add 10.77.0.$i/24 dev v$i
  ip -n $id-$i link set lo up
  ip -n $id-$i link set v$i up
  ip -n $id-switch link set p$i master br0 up
  # The queue holds what TCP has under way: what is dropped would cost more than the rate.
  tc -n $id-$i qdisc add dev v$i root tbf rate $rate burst 128kb latency 2s || skip "no tbf queue"
done

mkdir -p "$work/tmp"
export TMPDIR="$work/tmp"  # flight records of the jobs that are made to fail
# mpirun calls it as AGENT HOST COMMAND...; hosts are named by their addresses.
cat >"$work/agent" <<AGENT
#!/bin/sh
host=\${1##*.}
shift
# Of a host that is gone only the probe knows: it has let its ranks start before.
[ "\$*" = true ] && [ -e "$work/gone-\$host" ] && exit 255
exec ip netns exec $id-\$host unshare --uts sh -c "hostname host\$host; \$*"
AGENT
chmod +x "$work/agent"
for n in $(seq 1 400); do echo "$n bottles of $((n * n)) on the wall"; done >"$work/text"

# start HOSTS RANKS_PER_HOST "MPIRUN FLAGS" PROGRAM...
start() {
  list=$(for i in $(seq 1 $1); do printf '10.77.0.%s:%s,' $i $2; done)
  ranks=$(($1 * $2)) placing=$3
  shift 3
  "$work/agent" 10.77.0.1 timeout 300 mpirun -n $ranks --host ${list%,} $placing \
    --mca plm_rsh_agent "$work/agent" --mca btl_tcp_if_include 10.77.0.0/24 \
    --mca oob_tcp_if_include 10.77.0.0/24 --mca btl self,vader,tcp --bind-to none "$@"
}
# run NAME HOSTS RANKS_PER_HOST "MPIRUN FLAGS" ECHELON FLAGS...
run() {
  name=$1 hosts_of_run=$2 each=$3 flags=$4
  shift 4
  start $hosts_of_run $each "$flags" "$echelon" train --model llama-tiny --data "$work/text" --global-batch 8 --micro-batch 2 --seq-len $tokens --steps 6 \
    --threads 1 --sample 0 --eval-samples 0 --json "$@" >"$work/$name.json" 2>"$work/$name.err" ||
    { echo "$name failed"; cat "$work/$name.err"; exit 1; }
  seconds=$(sed 's/.*"step_seconds":{"predicted":[^,]*,"measured":\([^}]*\)}.*/\1/' "$work/$name.json")
  loss=$(sed 's/.*"final_loss":\([^,]*\),.*/\1/' "$work/$name.json")
  printf '%-44s %8.3f s a step   loss %s\n' "$name" $seconds $loss
}
faster() { # A B: a step of A takes less time than one of B
  a=$(sed 's/.*"step_seconds":{"predicted":[^,]*,"measured":\([^}]*\)}.*/\1/' "$work/$1.json")
  b=$(sed 's/.*"step_seconds":{"predicted":[^,]*,"measured":\([^}]*\)}.*/\1/' "$work/$2.json")
  awk "BEGIN { exit !($a < $b) }" || { echo "$1 ($a s) is not faster than $2 ($b s)"; exit 1; }
}
same_loss() {
  [ "$(sed 's/.*"final_loss":\([^,]*\),.*/\1/' "$work/$1.json")" = \
    "$(sed 's/.*"final_loss":\([^,]*\),.*/\1/' "$work/$2.json")" ] || { echo "$1 and $2 differ in loss"; exit 1; }
}

echo "each host sends at $rate"
# Activations of long sequences are more than the gradients of a small model.
tokens=256
run tp-inside-hosts 2 2 "--map-by slot" --dp 2 --tp 2
run tp-across-hosts 2 2 "--map-by node" --dp 2 --tp 2
grep -q "2 nodes: host1 has ranks 0-1, host2 ranks 2-3\|host1 has ranks 0-1" "$work/tp-inside-hosts.err" ||
  { echo "the node map is not printed"; cat "$work/tp-inside-hosts.err"; exit 1; }
grep -q "2 of 2 tp groups leave a node" "$work/tp-across-hosts.err" ||
  { echo "no warning of tp groups that leave a node"; exit 1; }
! grep -q "leave a node" "$work/tp-inside-hosts.err" || { echo "a warning without a reason"; exit 1; }
same_loss tp-inside-hosts tp-across-hosts
faster tp-inside-hosts tp-across-hosts
tokens=64
run dp-plain 4 1 "" --dp 4
run dp-int8 4 1 "" --dp 4 --compress int8
run dp-powersgd 4 1 "" --dp 4 --compress powersgd:2
faster dp-int8 dp-plain
faster dp-powersgd dp-plain
tokens=256
run dp-one-bucket 2 1 "" --dp 2
run dp-bucket-a-layer 2 1 "" --dp 2 --bucket 1KiB
same_loss dp-one-bucket dp-bucket-a-layer
run cp-ring 2 1 "" --cp 2 --cp-kind ring
run cp-allgather 2 1 "" --cp 2 --cp-kind allgather
run cp-ring-of-4 4 1 "" --cp 4 --cp-kind ring
run pp 4 1 "" --pp 4

# What waits for the network, with computation that sleeps as long as the network needs.
for count in 2 4; do
  start $count 1 "" "$link_overlap" ring 1 2>"$work/overlap.err" &&
    start $count 1 "" "$link_overlap" buckets 1 2>"$work/overlap.err" ||
    { echo "less of the transfers is hidden than can be"; cat "$work/overlap.err"; exit 1; }
done

# A host that is gone: the training goes on without it, from its last checkpoint.
touch "$work/gone-2"
rm -rf "$work/elastic"
"$work/agent" 10.77.0.1 timeout 200 "$echelon" launch --hosts 10.77.0.1:1,10.77.0.2:1 --agent "$work/agent" \
  --elastic --max-restarts 2 -- train --model llama-tiny --data "$work/text" --dp 2 --global-batch 4 \
  --micro-batch 1 --seq-len 32 --steps 8 --threads 1 --sample 0 --save-every 2 --checkpoint "$work/elastic" \
  --timeout 20 --die 1:6:forward >"$work/elastic.out" 2>&1 ||
  { echo "launch did not go on without host 2"; cat "$work/elastic.out"; exit 1; }
grep -q "rank 1 is gone" "$work/elastic.out" && grep -q "1 host left; going on with --dp 1" "$work/elastic.out" &&
  grep -q "restart 1 of 2 from $work/elastic/step-0000000" "$work/elastic.out" &&
  [ -e "$work/elastic/step-00000008/checkpoint.json" ] ||
  { echo "launch said or did something else"; cat "$work/elastic.out"; exit 1; }
echo "host 2 is gone: launch goes on with --dp 1 from the last checkpoint"
