"""The modelled time of a step compared with a GPU's clock and with published figures.

    python -m benchmarks.clock [NAME ...] [--hlo NAME=FILE ...] [--list]

The steps are traced, not compiled: no GPU and no compiler for one is needed. `--hlo` reads a row
from the text of a compiled program instead, as `Compiled.as_text()` gives it. No rate of
`mesh.rates` comes from any of these rows. MFU counts the table of positions, which `benchmarks.gpu`
leaves out: 0.2 points at 124M.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import pathlib
from types import MappingProxyType

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

from axon_dist import ActivationCheckpointing, build_train_step, fsdp
from axon_dist.inspect import model_time
from axon_dist.mesh import abstract_world
from axon_dist.mesh.chips import hardware
from axon_dist.models import Transformer, TransformerConfig, next_token_loss, num_params
from axon_dist.planner import read_step

from .gpu import SIZES
from .size_rows import model_flops

MACHINE = hardware("h100")
"""The machine of all rows."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A step whose time is known.

    Args:
        config: the model.
        samples: of a step, on all devices.
        milliseconds: of a step, by the clock; of published rates, from tokens per second.
        source: who measured it.
        devices: H100s, with FSDP.
        remat: what is recomputed.
        update_every: batches of this size whose gradients are added up before an update; the time
            is that of one of them.
    """

    config: TransformerConfig
    samples: int
    milliseconds: float
    source: str
    devices: int = 1
    remat: ActivationCheckpointing | None = None
    update_every: int = 1

    @property
    def flops(self) -> float:
        """Useful FLOPs of a device and step."""
        length = self.config.max_length
        return model_flops(self.config, self.samples * length, length) / self.devices

    def utilization(self, milliseconds: float) -> float:
        """MFU of a step of that time."""
        return self.flops / (MACHINE.flops * milliseconds / 1e3)


def milliseconds_of(
    config: TransformerConfig, samples: int, rate: float, attention: float, tables: int = 1
) -> float:
    """The time of a step on one device whose published figure is a rate in FLOP/s.

    Those who publish rates count different FLOPs, so a rate is turned into a time by their count.

    Args:
        config: the model.
        samples: of the device.
        rate: the published FLOP/s.
        attention: the share of pairs that they count: 1 for all, 0.5 for those that a causal mask
            leaves.
        tables: whether they count the tables that are only looked up, 1 or 0.
    """
    length = config.max_length
    looked_up = config.vocab_size * config.width * (0 if config.tied_head else 1)
    if config.positions == "learned":
        looked_up += length * config.width
    weights = num_params(config) - looked_up * (1 - tables)
    pairs = 12 * config.num_layers * config.width * length
    return 1e3 * samples * length * (6 * weights + attention * pairs) / rate


def _rows() -> dict[str, Row]:
    every, products = ActivationCheckpointing(), ActivationCheckpointing(policy="dots_no_batch")
    small, large = SIZES["124m"].config(), SIZES["1.3b"].config()
    looped, unrolled = {"scan_layers": True}, {"scan_layers": False}
    xl = dataclasses.replace(small, width=1600, num_layers=48, num_heads=25, **unrolled)
    llama = dataclasses.replace(TransformerConfig.preset("7b"), max_length=4096, **unrolled)
    ours = "benchmarks.gpu, 2026-11-28"
    return {
        "124m-loop": Row(dataclasses.replace(small, **looped), 64, 158.9, ours),
        "124m-jit": Row(
            dataclasses.replace(small, **unrolled), 64, 144.2, f"plain jax.jit, {ours}"
        ),
        "1.3b-remat": Row(dataclasses.replace(large, **looped), 16, 617.1, ours, remat=every),
        # The script adds up eight batches before it updates, and counts all pairs.
        "gpt2-xl": Row(
            xl,
            14,
            milliseconds_of(xl, 14, 478.73e12, attention=1.0),
            "torch.compile, ROCm/TransformerEngine#72",
            update_every=8,
        ),
        "llama2-7b": Row(llama, 16, 721.0, "MaxText, JAX-Toolbox", devices=8, remat=products),
        "llama2-7b-32": Row(
            llama,
            32,
            milliseconds_of(llama, 4, 492e12, attention=0.5),
            "MaxText, configs/a3/llama_2_7b",
            devices=8,
            remat=products,
        ),
    }


ROWS: MappingProxyType[str, Row] = MappingProxyType(_rows())
"""The rows by name; those of this library's own runs first."""


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["*"], metavar="NAME")
    parser.add_argument("--hlo", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--list", action="store_true", help="print the rows and do nothing")
    args = parser.parse_args()
    names = [name for name in ROWS if any(fnmatch.fnmatch(name, p) for p in args.names)]
    if args.list:
        print("\n".join(names))
        return
    files = dict(each.partition("=")[::2] for each in args.hlo)
    table = Table(caption="ms a step on H100s; MFU of 989 TFLOP/s, causal attention counted once")
    for column in ("row", "read from", "modelled", "MFU", "clock", "MFU", "off", "source"):
        table.add_column(column)
    for name in names:
        row = ROWS[name]
        modelled = compiled(files[name]) if name in files else traced(row)
        table.add_row(
            name,
            "the compiled step" if name in files else "the traced step",
            f"{modelled:.1f}",
            f"{row.utilization(modelled):.1%}",
            f"{row.milliseconds:.1f}",
            f"{row.utilization(row.milliseconds):.1%}",
            f"{modelled / row.milliseconds - 1:+.1%}",
            row.source,
        )
    Console(width=150).print(table)


def compiled(file: str) -> float:
    """Milliseconds of a step, from the text of its compiled program."""
    found = model_time(pathlib.Path(file).read_text(), machine=MACHINE)
    assert found is not None
    return 1e3 * found.total


def traced(row: Row) -> float:
    """Milliseconds of a step, from its traced program."""
    step = build_train_step(
        lambda: Transformer(row.config, rngs=nnx.Rngs(0)),
        optax.adamw(3e-4),
        next_token_loss,
        fsdp(),
        abstract_world(f"fsdp={row.devices}", row.devices, "cuda"),
        clip_norm=1.0,
        precision="bf16",
        remat=row.remat,
        # As measured: the rule for loops would ask a chip that is only described here.
        scan_layers=row.config.scan_layers,
    )
    tokens = jax.ShapeDtypeStruct((row.samples, row.config.max_length + 1), jnp.int32)
    cost = read_step(step, {"tokens": tokens}).step_time(MACHINE, "bfloat16")
    return 1e3 * (cost.total - cost.update * (1 - 1 / row.update_every))


if __name__ == "__main__":
    main()
