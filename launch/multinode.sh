#!/usr/bin/env bash
# One of several processes, each with all GPUs of its machine. Start it on every machine:
#
#   COORDINATOR=host0:1234 PROCESSES=2 PROCESS_ID=0 launch/multinode.sh train --config ... (on host0)
#   COORDINATOR=host0:1234 PROCESSES=2 PROCESS_ID=1 launch/multinode.sh train --config ... (on host1)
#
# COORDINATOR: where process 0 runs, and a free port there, which the others must reach.
# The workdir and the data must be in the same place everywhere, on a file system that all share.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/env.sh
source "$here/env.sh"
[ $# -gt 0 ] || { echo "error: multinode.sh needs train, train_amp or evaluate" >&2; exit 2; }
: "${COORDINATOR:?is not set, expected HOST:PORT of process 0}"
: "${PROCESSES:?is not set, expected the number of processes}"
: "${PROCESS_ID:?is not set, expected 0 to PROCESSES - 1}"
run_entry "$@" --coordinator_address="$COORDINATOR" --num_processes="$PROCESSES" \
  --process_id="$PROCESS_ID"
