import enum

import jax
import pytest

from axon_dist.launch.settings import JAX_FLAGS, compare_settings, difference_text, read_settings


class Choice(enum.Enum):
    STANDARD = 1


def differing(one, other):
    return compare_settings(read_settings(one, {}), read_settings(other, {}))


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ({"XLA_FLAGS": "--xla_a=1"}, {"XLA_FLAGS": "--xla_a=2"}, ["XLA_FLAGS --xla_a"]),
        ({"XLA_FLAGS": "--xla_a=1 --xla_a=2"}, {"XLA_FLAGS": "--xla_a=2"}, []),
        ({"XLA_FLAGS": "--xla_a --xla_b=3"}, {"XLA_FLAGS": " --xla_b=3  --xla_a=true"}, []),
        ({"LIBTPU_INIT_ARGS": "--xla_t=1"}, {}, ["LIBTPU_INIT_ARGS --xla_t"]),
        ({"NVIDIA_TF32_OVERRIDE": "0"}, {}, ["NVIDIA_TF32_OVERRIDE"]),
        ({"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"}, ["NCCL_ALGO"]),
        ({"XLA_FLAGS": "--xla_a='1"}, {"XLA_FLAGS": "--xla_a=1"}, ["XLA_FLAGS --xla_a"]),
        (
            {
                "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_dump_to=/tmp/0 "
                "--xla_cpu_collective_call_terminate_timeout_seconds=9",
                "LIBTPU_INIT_ARGS": "--megascale_port=7",
                "XLA_PYTHON_CLIENT_MEM_FRACTION": ".5",
                "RANK": "0",
            },
            {"RANK": "1"},
            [],
        ),
    ],
)  # fmt: skip
def test_environment_variables_that_must_agree_between_hosts(one, other, names):
    assert list(differing(one, other)) == names
    assert sorted(differing(other, one)) == sorted(names)
    assert differing(one, one) == ()


def test_flags_in_a_file_are_read_as_xla_reads_them(tmp_path):
    file = tmp_path / "flags"
    file.write_text("--xla_a=1\n--xla_dump_to=/tmp/0\n")
    assert differing({"XLA_FLAGS": str(file)}, {"XLA_FLAGS": "--xla_a=1"}) == ()
    missing = {"XLA_FLAGS": str(tmp_path / "none")}
    assert differing(missing, {}) == ("XLA_FLAGS --file",)


@pytest.mark.parametrize(
    "flag",
    [
        "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl",
        "jax_threefry_partitionable", "jax_numpy_dtype_promotion", "jax_debug_nans",
    ],
)  # fmt: skip
def test_flags_of_jax_that_change_a_program_are_compared(flag):
    flags = dict(jax.config.values)
    changed = flags | {flag: "another"}
    found = compare_settings(read_settings({}, flags), read_settings({}, changed))
    assert found == (flag,)


def test_other_flags_of_jax_are_not_compared():
    flags = {name: value for name, value in jax.config.values.items() if name not in JAX_FLAGS}
    assert read_settings({}, flags) == {}
    assert {"jax_platforms", "jax_num_cpu_devices", "jax_compilation_cache_dir"} <= set(flags)


def test_values_are_plain_bounded_and_told_without_escape_sequences():
    long = {"NCCL_ALGO": "a" * 10_000}
    (short,) = read_settings(long, {}).values()
    assert len(short) < 300
    assert differing(long, {"NCCL_ALGO": "a" * 9_999 + "b"}) == ("NCCL_ALGO",)
    assert read_settings({}, {"jax_enable_x64": Choice.STANDARD}) == {"jax_enable_x64": "standard"}
    text = difference_text({"\x1b[2J": "\x1b[0m"}, {"a": "1", "b": "2", "c": "3"}, (0, 1))
    assert text.startswith(r"\x1b[2J is '\x1b[0m' in process 0 and not set in process 1, a is ")
    assert text.endswith(", 1 more differ")
    assert difference_text({"a": "1"}, {"a": "1"}, (0, 1)) == ""
