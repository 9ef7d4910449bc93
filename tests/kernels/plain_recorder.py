"""Stands in for plain-Triton kernels: a launch compiles for sm_90 and notes what the assembler made of it."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion")


class Recorder:
    launched: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
            arguments = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
            Recorder.launched.append({"kernel": self.kernel.__name__, **compile_plain(self.kernel, options, arguments)})

        return launch


def compile_plain(kernel: Any, options: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Registers, stack bytes and opcode counts of the kernel as a launch with these arguments compiles it."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    opcodes: dict[str, int] = {}
    for opcode in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", sass):
        opcodes[opcode] = opcodes.get(opcode, 0) + 1
    numbers = {key: int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK")}  # type: ignore[index]
    return {"registers": numbers["REG"], "stack_bytes": numbers["STACK"], "shared_bytes": compiled.metadata.shared,
            "opcodes": opcodes}  # fmt: skip


def record(cases: dict[str, Callable[[], object]]) -> None:
    """Runs each case and prints a JSON line for every kernel that it launched."""
    for case, run in cases.items():
        Recorder.launched.clear()
        run()
        for line in Recorder.launched:
            print(json.dumps({"case": case, **line}))
