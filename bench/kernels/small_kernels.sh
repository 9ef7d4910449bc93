#!/usr/bin/env bash
# Checks, then times, the small kernels on one Hopper GPU: the sampler and verification, sparse prefill, qkv_post,
# kv_pack, and the reductions over peers.
#
#     bench/kernels/small_kernels.sh [OUT]        # from the repository's root; OUT: folder of the results
#
# A part whose check fails is not timed. FlashInfer is timed too where its package is on PYTHONPATH. Two GPUs: see the
# last line.
set -u
out=${1:-bench/results}
export PYTHONPATH=kernels:bench/kernels:.:${PYTHONPATH:-}
export CUDA_DEVICE_MAX_CONNECTIONS=32 OMP_NUM_THREADS=8
check() { timeout "$1" python3 -m pytest -q -x -p no:cacheprovider --import-mode=importlib "${@:2}"; }
time_it() { timeout "$1" python3 "bench/kernels/$2" --out "$out" "${@:3}"; }

check 150 tests/kernels/test_sample_kernels.py tests/kernels/test_verify_draft.py tests/kernels/test_advance.py \
  && time_it 120 sample.py
check 120 tests/kernels/test_stem_select.py tests/kernels/test_block_sparse_prefill.py \
  && time_it 150 sparse_prefill.py
check 150 tests/kernels/test_qkv_post_gpu.py && {
  peer=$(mktemp)
  python3 -c 'import flashinfer' 2>/dev/null && timeout 120 python3 bench/kernels/qkv_post_peer.py "$peer"
  time_it 150 qkv_post.py --compile $([ -s "$peer" ] && echo --peer "$peer")
}
check 60 tests/kernels/test_kv_pack.py \
  && time_it 60 kv_pack.py
check 150 tests/kernels/test_peer_reduce.py \
  && time_it 60 allreduce.py
if [ "$(python3 -c 'import torch; print(torch.cuda.device_count())')" -gt 1 ]; then
  timeout 120 torchrun --nproc-per-node gpu bench/kernels/allreduce.py --out "$out"
fi
