#!/usr/bin/env bash
# Submits the job of one run, or runs it here:
#   submit.sh slurm|local SIZE REPOSITORY NODES RANKS_PER_NODE MINUTES FLAGS...
# JUBE calls it in the folder of the run. What it needs of its environment is in README.md.
set -euo pipefail

where=$1 size=$2 repository=$3 nodes=$4 ranks=$5 minutes=$6
shift 6

# Says what is wrong with something, and ends.
refuse() {
  echo "$1: $2" >&2
  exit 2
}

[ "$size" != unknown ] || refuse "which size" "give a tag: 13 or 175"
[ "$where" = slurm ] || [ "$nodes" = 1 ] || refuse "tag local" "$nodes nodes are more than this machine; add the tag toy"
for name in DATA_PATH VOCAB_FILE MERGE_FILE; do
  value=${!name:-}
  [ -n "$value" ] || refuse "$name" "is not set; jube/README.md says what it names"
  [ "${value:0:1}" = / ] || refuse "$name $value" "begins at no folder that all ranks know; give it from / on"
done
for file in "$DATA_PATH.bin" "$DATA_PATH.idx" "$VOCAB_FILE" "$MERGE_FILE"; do
  [ -r "$file" ] || refuse "$file" "is no file that can be read"
done

job=("$repository/jube/job.sh" "$repository" "$nodes" "$ranks" "$@")
job+=(--data-path "$DATA_PATH" --tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE")
if [ "$where" = local ]; then
  exec bash "${job[@]}" >job.out 2>job.err
fi
devices=()
case " $* " in *" nccl "*) devices=(--gpus-per-node="$ranks") ;; esac
exec sbatch --job-name=megatron-cc --nodes="$nodes" --ntasks-per-node=1 "${devices[@]}" --exclusive --no-requeue \
  --time="$minutes" --output=job.out --error=job.err "${job[@]}"
