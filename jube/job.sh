#!/usr/bin/env bash
# The job of one run: job.sh REPOSITORY NODES RANKS_PER_NODE FLAGS...
# It trains, and leaves a file `ready` or `error` in its folder, which is what JUBE waits for.
set -uo pipefail

repository=$1 nodes=$2 ranks=$3
shift 3
trap : TERM # that the time is over: the ranks get the same signal, and `error` is still to be written

launch=(python "$repository/tools/launch.py" --nproc-per-node "$ranks" --tee 3 --redirects 3 --log-dir ranks)
if [ -n "${SLURM_JOB_ID:-}" ]; then
  echo "Submitted batch job $SLURM_JOB_ID"
  launch=(srun --kill-on-bad-exit=1 "${launch[@]}")
fi
if [ "$nodes" = 1 ]; then
  launch+=(--standalone)
else
  MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)${MASTER_SUFFIX:-}}
  MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
  launch+=(--nnodes "$nodes" --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id "$SLURM_JOB_ID")
fi
export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}} # srun gives one processor otherwise

# shellcheck disable=SC2086  # several words
if "${launch[@]}" "$repository/pretrain_gpt.py" "$@" ${EXTRA_FLAGS:-}; then
  touch ready
else
  status=$?
  touch error
  exit "$status"
fi
