"""A new schedule is one file with a function, and one row of `PipelineSchedule`."""

import pathlib
import shutil
import subprocess
import sys

import axon_dist

PACKAGE = pathlib.Path(axon_dist.__file__).parent
FILE = '''
from .action import Action, Phase
from .table import Schedule, order_to_table


def one_by_one(num_devices: int, num_microbatches: int) -> Schedule:
    """A microbatch goes all the way and back before the next one starts."""
    order = [
        [Action(device, phase, m) for m in range(num_microbatches) for phase in (Phase.F, Phase.B)]
        for device in range(num_devices)
    ]
    return order_to_table("one_by_one", order, range(num_devices), num_microbatches)
'''
PROGRAM = """
from axon_dist.schedule import PipelineSchedule, build_schedule, compare, validate
from axon_dist.train.cli.main import main

table = build_schedule("one_by_one", 4, 8)
validate(table)
assert table.num_ticks > build_schedule("gpipe", 4, 8).num_ticks
assert "one_by_one" in [row.name for row in compare(4, 8)]
assert main(["schedule", "one_by_one", "--stages", "2", "--microbatches", "4"]) == 0
assert main(["schedule", "one_by_on", "--stages", "2", "--microbatches", "4"]) == 2
"""


def copied(folder):
    """The package, of which only `schedule` is a copy that can be changed."""
    package = folder / "axon_dist"
    package.mkdir()
    for path in PACKAGE.iterdir():
        if path.name == "schedule":
            shutil.copytree(path, package / path.name)
        elif path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    return package / "schedule"


def test_one_file_and_one_row_make_a_schedule(tmp_path):
    schedules = copied(tmp_path)
    (schedules / "one_by_one.py").write_text(FILE)
    registry = schedules / "registry.py"
    text = registry.read_text()
    row = '    ONE_BY_ONE = "one_by_one", Builder(one_by_one)\n'
    text = text.replace("from .simulate", "from .one_by_one import one_by_one\nfrom .simulate", 1)
    registry.write_text(text.replace('    GPIPE = "gpipe"', f'{row}    GPIPE = "gpipe"', 1))
    command = [sys.executable, "-c", PROGRAM]
    env = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=env
    )
    assert done.returncode == 0, done.stderr
    assert "one_by_one" in done.stdout
    assert "Did you mean 'one_by_one'?" in done.stderr
