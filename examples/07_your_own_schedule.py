"""A schedule of your own: a table as text, checked, drawn, measured and trained with.

python examples/07_your_own_schedule.py
"""

import numpy as np
import optax
from flax import nnx

from axon_dist import Pipeline, World, build_train_step
from axon_dist.core.errors import ScheduleError
from axon_dist.models import MLP, classification_loss
from axon_dist.schedule import Schedule, draw, simulate, validate

# One row per device, one cell per tick; "2F0" is stage 2, forward, microbatch 0.
TABLE = """\
0F0,0F1,,0B0,0F2,0B1,,0B2
,1F0,1B0,1F1,1B1,1F2,1B2,
"""


def main() -> None:
    """Checks, draws, measures and runs the table; then shows what a wrong one says."""
    schedule = Schedule.from_csv(TABLE, name="mine")
    validate(schedule)
    print(draw(schedule))
    print(f"bubble: {simulate(schedule).bubble_fraction:.1%}\n")

    world = World.emulate(2, "pp=2")
    stages = [MLP((32, 64, 16), rngs=nnx.Rngs(0)), nnx.Linear(16, 2, rngs=nnx.Rngs(1))]
    pipe = Pipeline.from_modules(stages, num_microbatches=3, schedule=schedule)
    step = build_train_step(pipe.module, optax.adam(1e-2), classification_loss, pipe, world)
    state = step.init()
    x = np.random.default_rng(0).normal(size=(48, 32)).astype(np.float32)
    batch = {"x": x, "y": (x.sum(1) > 0).astype(np.int32)}
    for number in range(5):
        state, metrics = step(state, batch)
        print(f"step {number}: loss {float(metrics['loss']):.4f}")

    try:
        validate(Schedule.from_csv(TABLE.replace(",1F0,1B0", "1F0,,1B0"), name="too early"))
    except ScheduleError as error:
        print(f"\na table that cannot run:\n{error}")


if __name__ == "__main__":
    main()
