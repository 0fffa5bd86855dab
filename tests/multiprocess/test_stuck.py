"""A process that lives but takes no step, and one that is told to stop while it is busy."""

import itertools
import signal

import pytest

from axon_dist.launch.watchdog import EXIT_PEER_LOST

pytestmark = pytest.mark.multiprocess

TRAIN = """
import os, sys, threading, time
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from axon_dist import World, build_train_step, ddp
from axon_dist.train import LoopOptions, Trainer

mode, count = sys.argv[1], int(sys.argv[2])
world = World.emulate(count)
me = world.process_index

def say(*words):
    print(*words, flush=True)

def slow(x):
    # Tracing is part of compiling, and runs in the main thread.
    if mode == "compiling":
        say("compiling")
        time.sleep(2 if me == 0 else 0)
    return x

def loss_fn(model, batch):
    return jnp.mean((slow(model(batch["x"])) - 1.0) ** 2)

def batches():
    for number in range(10**6):
        if mode == "hanging" and me == 1 and number == 5:
            say("hanging")
            threading.Event().wait()
        yield {"x": np.ones((2, 2), np.float32)}

def validation():
    for number in range(10**6):
        if mode == "validating" and number == 3:
            say("validating")
        time.sleep(0.01)
        yield {"x": np.ones((2, 2), np.float32)}

step = build_train_step(
    lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn, ddp(), world
)
trainer = Trainer(
    step=step, batches=batches(),
    options=LoopOptions(num_steps=10**6, eval_every=4 if mode == "validating" else 0),
    validation=validation if mode == "validating" else None,
    save=lambda state, number, loss: say("saved step", number),
)
result = trainer.fit()
say("ended by", result.reason, "after", result.num_steps)
"""
STEP_SECONDS = 8


@pytest.mark.full
def test_a_process_that_hangs_is_named_by_all(start):
    processes = start(3, "-c", TRAIN, "hanging", "3", AXON_STEP_TIMEOUT=str(STEP_SECONDS))
    assert processes.wait([0, 1, 2], timeout=120) == [EXIT_PEER_LOST] * 3, processes.text(0)
    for rank in range(3):
        text = processes.text(rank)
        assert "process 1 (host " in text
        assert f"hangs: no sign for {STEP_SECONDS} s after step 5, and the others wait" in text
    # Where its main thread is: in the loop's request for a batch, in the wait of a lock.
    assert "batch = next(batches, _END)" in processes.text(1)
    assert "self.step(state, batch" in processes.text(0)


CASES = [
    pytest.param(*case, marks=[] if case == ("validating", "one") else pytest.mark.slow)
    for case in itertools.product(("validating", "compiling"), ("all", "one"))
]


@pytest.mark.full
@pytest.mark.parametrize(("mode", "told"), CASES)
def test_sigterm_in_the_middle_saves_at_the_same_step_everywhere(start, mode, told):
    processes = start(2, "-c", TRAIN, mode, "2")
    # All of them: before its first step a process may not handle signals yet.
    processes.wait_for(mode)
    for process in processes.all if told == "all" else processes.all[:1]:
        process.send_signal(signal.SIGTERM)
    assert processes.wait([0, 1], timeout=60) == [0, 0], processes.text(0) + processes.text(1)
    texts = [processes.text(rank) for rank in range(2)]
    saved = [[line for line in text.splitlines() if line.startswith("saved")] for text in texts]
    assert saved[0] == saved[1]
    assert len(saved[0]) == 1
    assert "ended by SIGTERM after" in texts[0]
    assert f"ended by {'SIGTERM' if told == 'all' else 'another process'} after" in texts[1]
    if mode == "validating":
        assert saved[0] == ["saved step 4"]
