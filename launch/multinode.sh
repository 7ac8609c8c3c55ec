#!/usr/bin/env bash
# Start one of several processes, each with all GPUs of its machine. Run it on every machine:
#
#   COORDINATOR=host0:1234 PROCESSES=2 PROCESS_ID=0 launch/multinode.sh train --config ... (on host0)
#   COORDINATOR=host0:1234 PROCESSES=2 PROCESS_ID=1 launch/multinode.sh train --config ... (on host1)
#
# COORDINATOR: host of process 0 and a free port there, reachable from the other machines.
# The workdir and the data must have the same path everywhere, on a shared file system. What is compiled
# is kept beside the workdir, in `compiled`, unless JAX_COMPILATION_CACHE_DIR names another folder.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/env.sh
source "$here/env.sh"
[ $# -gt 0 ] || {
  echo "error: multinode.sh needs train, train_amp, evaluate or benchmark" >&2; exit 2
}
: "${COORDINATOR:?is not set, expected HOST:PORT of process 0}"
: "${PROCESSES:?is not set, expected the number of processes}"
: "${PROCESS_ID:?is not set, expected 0 to PROCESSES - 1}"
share_compiled "$@"
run_entry "$@" --coordinator_address="$COORDINATOR" --num_processes="$PROCESSES" \
  --process_id="$PROCESS_ID"
