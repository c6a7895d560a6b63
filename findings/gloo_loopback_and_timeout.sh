#!/usr/bin/env bash
# gloo (torch 2.13.0) offers other machines the address 127.0.0.1, and then waits five times as long as
# init_process_group's timeout says.
#
# Without GLOO_SOCKET_IFNAME gloo listens on the address that the machine's own name resolves to. Many
# Linux systems map that name to a loopback address in /etc/hosts, although MASTER_ADDR leads to another
# network interface, over which the ranks have just found each other. Then one rank fails at once, since
# nobody listens on its own 127.0.0.1. The other waits for it: for 20 s with a timeout of 4 s, 51 s with
# 10 s, and so for ten minutes with two minutes.
#
# It matters to whoever starts torchrun on several machines: set GLOO_SOCKET_IFNAME, and do not take the
# timeout for the time after which a wrong setting shows.
#
# The script makes two machines, network namespaces with a cable between them, whose /etc/hosts map the
# name to 127.0.0.1. It exits with 1 if this has changed, and with 2 where it may not make them (it needs
# root, and the program ip).
set -euo pipefail
timeout_s=4
folder=$(mktemp -d)
names=("gloo-$$-0" "gloo-$$-1")
clean() {
    for name in "${names[@]}"; do
        ip netns delete "$name" 2>/dev/null || true
        rm -rf "/etc/netns/$name"
    done
    rm -rf "$folder"
}
trap clean EXIT
for i in 0 1; do
    if ! ip netns add "${names[$i]}" 2>"$folder/why"; then
        echo "not run: network namespaces are not allowed here: $(cat "$folder/why")"
        exit 2
    fi
    mkdir -p "/etc/netns/${names[$i]}"  # what ip shows as /etc inside
    echo "127.0.0.1 localhost $(hostname)" >"/etc/netns/${names[$i]}/hosts"
done
if ! ip link add cable0 netns "${names[0]}" type veth peer cable1 netns "${names[1]}" 2>"$folder/why"; then
    echo "not run: no network between namespaces here: $(cat "$folder/why")"
    exit 2
fi
for i in 0 1; do
    ip -n "${names[$i]}" address add "10.78.0.$((i + 1))/24" dev "cable$i"
    ip -n "${names[$i]}" link set lo up
    ip -n "${names[$i]}" link set "cable$i" up
done
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat >"$folder/rank.py" <<'PYTHON'
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

began = time.monotonic()
try:
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[1])))
    dist.all_reduce(torch.ones(1))
    outcome = "connected"
except Exception as error:
    outcome = " ".join(str(error).split("] ")[-1].split())
print(f"{time.monotonic() - began:.0f} s, rank {os.environ['RANK']}, torch {torch.__version__}: {outcome}")
PYTHON
ranks() {
    for i in 0 1; do
        RANK=$i WORLD_SIZE=2 MASTER_ADDR=10.78.0.1 MASTER_PORT=29511 ip netns exec "${names[$i]}" \
            env ${1:+GLOO_SOCKET_IFNAME=$1$i} "$folder/venv/bin/python" "$folder/rank.py" $timeout_s \
            >"$folder/said$i" 2>/dev/null &
    done
    wait
    sort -n "$folder/said0" "$folder/said1"
}
echo "with GLOO_SOCKET_IFNAME:"
with=$(ranks cable)
echo "$with"
echo "without it, timeout $timeout_s s:"
without=$(ranks "")
echo "$without"
waited=$(tail -1 <<<"$without" | cut -d' ' -f1)
if [ "$(grep -c connected <<<"$with")" = 2 ] && grep -q 'refused, remote=\[127' <<<"$without" &&
    [ "$waited" -ge $((4 * timeout_s)) ]; then
    echo "as described: the address is 127.0.0.1, and the wait $waited s"
else
    echo "this has changed"
    exit 1
fi
