#!/bin/bash
# Measures on a machine with several GPUs, one rank on each: sirtaki beside plain NCCL, beside nccl-tests if their
# all_reduce_perf is on the PATH, and training steps beside DDP. Prepare, run and try it as first_minute.sh:
#   OUT=results tests/gpu/several_cards.sh --wheels dist
#   tests/gpu/several_cards.sh --dry-run
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"

of_dry_run=()
if [ "$DRY_RUN" ]; then
  of_dry_run=(--try-on-cpu -np 2 --rounds 1 --sizes 1K 64K --models "200 × Linear(64), batch 16")
fi

step 0-facts 40 python "$HERE/facts.py"
step 1-each-gpu 180 $CASES a_rank_on_each_gpu
step 2-beside-nccl 480 python "$ROOT/benchmarks/nccl.py" --json "$OUT/nccl.json" "${of_dry_run[@]}"
step 3-nccl-tests 120 python "$HERE/beside_nccl_tests.py" "$OUT/nccl.json"
finish
