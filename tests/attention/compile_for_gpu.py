"""Compile the Triton kernels to machine code of some GPUs; run by test_triton.py on its own.

No GPU is needed, and no interpreter must be on: whether a kernel is right is another question.
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outdraft.kernels.torch.noise import LN2, LOG_SERIES, ROUNDS, SQRT2
from outdraft.kernels.triton import attention_kernels as kernels
from outdraft.kernels.triton import pointwise
from outdraft.kernels.triton.attention import _launches
from outdraft.kernels.triton.noise import gumbel_rows

INT32 = ("query_start", "context_lens", "num_causal_B", "block_table")
INT32 = (*INT32, "starts", "contexts", "num_causal", "table")
INT64 = ("ancestors", "positions", "slots", "ids", "seeds", "anchors", "purposes")
FLOAT32 = ("part_acc", "part_top", "part_sum", "cos_sin")
NUMBERS = ("q_stride", "k_stride", "v_stride", "first_tile", "num_requests", "num_splits")
NUMBERS = (*NUMBERS, "table_stride", "window", "chunk", "num_rows", "num_blocks", "to_rows")
NUMBERS = (*NUMBERS, "to_requests", "to_blocks", "stride", "size")
KINDS = ("HAS_WINDOW", "HAS_CHUNK", "HAS_SINKS", "HAS_CAP", "CUTS_DRAFTS")
PLAIN = dict.fromkeys(KINDS, False) | {"sinks": None}
SIZES = {"NUM_KV_HEADS": 8, "HEADS_PER_KV": 4}
SIZES |= dict.fromkeys(("KEY_SIZE", "KEY_TILE", "VALUE_SIZE", "VALUE_TILE"), 128)


def compile_kernel(kernel, dtype: str, constants: dict, capability: int, **options: int) -> None:
    """To a cubin."""
    types = dict.fromkeys(INT32, "*i32") | dict.fromkeys(INT64, "*i64")
    types |= dict.fromkeys(FLOAT32, "*fp32") | dict.fromkeys(NUMBERS, "i32")
    types |= {f"to_{name}": kind for name, kind in types.items()}
    types |= {"scale": "fp32", "soft_cap": "fp32", "eps": "fp32", "sinks": "*fp32"}
    types |= dict.fromkeys(("to_rows", "to_requests", "to_blocks"), "i32")
    names = kernel.arg_names
    used = {name: value for name, value in constants.items() if name in names}
    signature = {
        name: "constexpr" if name in used else types.get(name, "*" + dtype) for name in names
    }
    places = {(names.index(name),): value for name, value in used.items()}
    is_aligned = [name for name in names if signature[name].startswith("*") or "stride" in name]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in is_aligned}
    source = ASTSource(kernel, signature, constexprs=places, attrs=attributes)
    options = {"enable_fp_fusion": True, **options}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    shared = made.metadata.shared
    print(f"{kernel.fn.__name__} {dtype} sm_{capability}: {shared} bytes of shared memory")
    assert shared <= {80: 99, 90: 227}[capability] * 1024  # 8.6 and 8.9 run what is for 8.0


def main() -> None:
    """The kernels of every kind of launch for one dtype and capability."""
    dtype, capability = sys.argv[1], int(sys.argv[2])
    for launch in _launches(heads_per_kv=4, head_size=128, itemsize=2 if dtype == "bf16" else 4):
        constants = SIZES | {
            "MIN_ROWS": launch.min_rows,
            "MAX_ROWS": launch.max_rows,
            "TILE_LANES": launch.lanes,
            "TILE_KEYS": launch.keys,
            "SPLIT_KEYS": launch.split_keys,
            "BLOCK_SIZE": 16,
            **PLAIN,
            "IS_SPLIT": launch.split_keys < 1 << 30,
            "IS_WIDE": False,
        }
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        compile_kernel(kernels.attend_tiles, dtype, constants, capability, **options)
    compile_kernel(kernels.merge_splits, dtype, constants, capability)
    del constants["sinks"]
    everything = constants | dict.fromkeys(KINDS, True)
    compile_kernel(kernels.attend_tiles, dtype, everything, capability, **options)
    compile_kernel(kernels.merge_splits, dtype, everything, capability)
    rows = dict.fromkeys(("KEY_ROW", "KEY_WIDTH", "VALUE_ROW", "VALUE_WIDTH"), 1024)
    compile_kernel(kernels.write_rows, dtype, rows, capability)
    compile_pointwise(dtype, capability)


def compile_pointwise(dtype: str, capability: int) -> None:
    """What is computed number by number, and what numbers are copied and drawn."""
    norm = {"SIZE": 4096, "WIDTH": 4096, "HAS_ADDED": True}
    heads = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "SIZE": 128, "HALF_WIDTH": 64, "HAS_NORMS": True}
    noise = {"TILE": 256, "ROUNDS": ROUNDS, "LN2": LN2, "SQRT2": SQRT2, "SERIES": LOG_SERIES}
    for kernel, constants in (
        (pointwise.add_and_norm_kernel, norm),
        (pointwise.rotate_heads_kernel, heads),
        (pointwise.silu_and_multiply_kernel, {"SIZE": 4096, "TILE": 1024}),
    ):
        compile_kernel(kernel, dtype, constants, capability, enable_fp_fusion=False)
    compile_kernel(gumbel_rows, "fp32", noise, capability, enable_fp_fusion=False)


if __name__ == "__main__":
    main()
