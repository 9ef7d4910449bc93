"""Compiles for sm_90 the Triton kernels whose speed hangs on what the compiler makes of them; prints JSON lines.

A script of its own because the kernels must be defined outside Triton's interpreter, which the tests beside it run in.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from katydid_kernels.kv_pack.kernel import move_runs_kernel
from katydid_kernels.qkv_post.kernel import qkv_post_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
QKV = {
    "qkv_ptr": "*bf16", "table_ptr": "*fp32", "positions_ptr": "*i32", "slots_ptr": "*i32", "q_weight_ptr": "*bf16",
    "k_weight_ptr": "*bf16", "q_ptr": "*fp8e4nv", "q_scales_ptr": "*fp32", "k_pages_ptr": "*fp8e4nv",
    "v_pages_ptr": "*fp8e4nv", "k_scale_ptr": "*fp32", "k_scale_step": "i32", "v_scale_ptr": "*fp32",
    "v_scale_step": "i32", "tokens": "i32", "eps": "fp32",
}  # fmt: skip
SHAPE = {
    "q_scale_ptr": None, "k_mean_ptr": None, "Q_HEADS": 64, "KV_HEADS": 8, "D": 128, "PAGE": 64, "NORM": "before_rope",
    "HADAMARD": False, "Q_SCALE": "dynamic", "ROWS": 8, "LOOP": 9, "V_TOKENS": 32, "V_COLUMNS": 128, "EARLY": True,
}  # fmt: skip
MOVE = {
    "bases_ptr": "*i64", "page_ids_ptr": "*i32", "objects_ptr": "*i32", "slot_ids_ptr": "*i32", "checksums_ptr": "*i64",
    "items": "i32", "layers": "i32", "heads": "i32", "object_heads": "i32", "first_head": "i32", "first_layer": "i32",
}  # fmt: skip


def compile_case(
    case: str, kernel: Any, types: dict[str, str], even: str, constants: dict[str, Any], warps: int
) -> None:
    """`even`: a stride, a multiple of 16."""
    types = types | {even: "i32"}
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name == even or signature[name][0] == "*"
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(kernel, signature, values, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    ir = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"(#blocked\d*) = #ttg.blocked<\{sizePerThread = .*?threadsPerWarp = (\[.*?\])", ir))
    stores = [layouts[name] for name in re.findall(r"tt\.store .*x!tt.ptr<f8E4M3FN>, (#blocked\d*)>", ir)]
    numbers = {key: int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK")}  # type: ignore[index]
    loads = {width: len(re.findall(rf"LDG\.E\.{width}\b", sass)) for width in (64, 128)}
    print(json.dumps({"case": case, **numbers, "loads": loads, "e4m3_stores": stores}))


def main() -> None:
    compile_case("qkv_post", qkv_post_kernel, QKV, "qkv_stride", SHAPE, 2)
    compile_case("qkv_post hadamard", qkv_post_kernel, QKV, "qkv_stride", SHAPE | {"HADAMARD": True}, 2)
    means = {name: value for name, value in SHAPE.items() if name != "k_mean_ptr"} | {"HADAMARD": True}
    compile_case("qkv_post means", qkv_post_kernel, QKV | {"k_mean_ptr": "*fp32"}, "qkv_stride", means, 2)
    for pack in (True, False):
        constants = {"RUN": 2048, "BLOCK": 2048, "PACK": pack}
        compile_case("kv_pack" if pack else "kv_unpack", move_runs_kernel, MOVE, "slot_words", constants, 8)


if __name__ == "__main__":
    main()
