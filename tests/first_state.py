"""Folders of runs that took no step, for tests of what reads a run."""

from pathlib import Path

from axon_dist.checkpoint import save_checkpoint
from axon_dist.checkpoint.layout import step_name
from axon_dist.step.portable import PortableForm
from axon_dist.train.app import RunDirectory
from axon_dist.train.app.runs import build_run


def begun(config):
    """The folder of a run with its config and a checkpoint of its first state, as step 1."""
    directory = RunDirectory(Path(config.run_dir))
    directory.path.mkdir()
    directory.write_config(config)
    meta = {"step": 1, "config": config.to_dict()}
    step = build_run(config).step
    state = PortableForm(step).to_canonical(step.init())
    save_checkpoint(directory.checkpoints / step_name(1), state, meta=meta)
    return directory.path
