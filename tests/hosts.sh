# Several "hosts" on this machine: network namespaces behind a bridge, and mpirun that starts ranks on them
# through an agent that enters a host's namespace. What crosses hosts crosses TCP. To be read (.) by a script
# that has set
#   echelon  the program
#   work     a directory
#   rate     what each host sends at, as tc says it (100mbit); empty: as fast as it goes
# Exits 77 where namespaces are not permitted, and prints the reason.
set -u
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
  [ -z "$rate" ] || tc -n $id-$i qdisc add dev v$i root tbf rate $rate burst 128kb latency 2s || skip "no tbf queue"
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
# run NAME HOSTS RANKS_PER_HOST "MPIRUN FLAGS" ECHELON FLAGS...: a training of a few steps, $tokens a sequence.
run() {
  name=$1 hosts_of_run=$2 each=$3 flags=$4
  shift 4
  start $hosts_of_run $each "$flags" "$echelon" train --model llama-tiny --data "$work/text" --global-batch 8 --micro-batch 2 --seq-len $tokens --steps 6 \
    --threads 1 --sample 0 --eval-samples 0 --json "$@" >"$work/$name.json" 2>"$work/$name.err" ||
    { echo "$name failed"; cat "$work/$name.err"; exit 1; }
}
step_seconds() { sed 's/.*"step_seconds":{"predicted":[^,]*,"measured":\([^}]*\)}.*/\1/' "$work/$1.json"; }
loss() { sed 's/.*"final_loss":\([^,]*\),.*/\1/' "$work/$1.json"; }
