"""Compiles Gluon kernels for sm_90 with no GPU and reads from the cubin what the assembler made of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_TYPE = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


@dataclass(frozen=True)
class Cubin:
    shared_bytes: int
    stack_bytes: int
    opcodes: dict[str, int]

    @property
    def spills(self) -> int:
        """Stack bytes, and loads and stores of local memory."""
        return self.stack_bytes + self.opcodes.get("LDL", 0) + self.opcodes.get("STL", 0)


def compile_gluon(kernel: Any, options: dict[str, int], **arguments: Any) -> Cubin:
    """Compile `kernel` as a launch with these arguments would; a dtype stands for an aligned pointer to it."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            box = f"{_TYPE[value.base.dtype]}{list(value.block_shape)}"
            signature[parameter.name] = f"tensordesc<{box},{value.layout!r}>"
        elif isinstance(value, torch.dtype):
            signature[parameter.name] = "*" + _TYPE[value]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [_TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
        sass = subprocess.run([_TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True)
    stack = re.search(r"STACK:(\d+)", usage.stdout)
    assert stack is not None, usage.stdout
    opcodes: dict[str, int] = {}
    for opcode in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_]*)", sass.stdout):
        opcodes[opcode] = opcodes.get(opcode, 0) + 1
    return Cubin(compiled.metadata.shared, int(stack[1]), opcodes)
