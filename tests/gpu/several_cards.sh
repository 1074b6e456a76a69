#!/bin/bash
# Measures on a machine with several GPUs, one rank on each: sirtaki beside plain NCCL, beside nccl-tests if their
# all_reduce_perf is on the PATH, and the training of published models beside DDP, on one GPU and on all; Horovod's
# published scaling stands beneath. At most 35 minutes. Prepare, run and try it as first_minute.sh:
#   OUT=results tests/gpu/several_cards.sh --wheels dist
#   tests/gpu/several_cards.sh --dry-run
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"

models="ResNet-50 BERT-large ResNet-101 VGG-16" operations=() training=()
if [ "$DRY_RUN" ]; then
  models="ResNet-50 BERT-large"
  operations=(--try-on-cpu -np 2 --rounds 1 --sizes 1K)
  training=(--try-on-cpu -np 2 --rounds 1 --steps 1 --warm-up 2)
fi

step 0-facts 60 python "$HERE/facts.py"
step 1-each-gpu 180 $CASES a_rank_on_each_gpu
step 2-beside-nccl 480 python "$ROOT/benchmarks/nccl.py" --json "$OUT/nccl.json" "${operations[@]}"
step 3-nccl-tests 120 python "$HERE/beside_nccl_tests.py" "$OUT/nccl.json"
for model in $models; do
  step "4-$model" 300 python "$ROOT/benchmarks/scaling.py" --models "$model" --json "$OUT/$model.json" "${training[@]}"
done
finish
