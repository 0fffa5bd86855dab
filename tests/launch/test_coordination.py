import types
from unittest import mock

import pytest

from axon_dist.core.errors import LaunchError
from axon_dist.launch import distributed as coordination


def settings(**values):
    """Sets JAX options, including ones that this version lacks."""
    return mock.patch.object(coordination.jax, "config", types.SimpleNamespace(values=values))


@pytest.mark.parametrize(
    "told",
    [{"jax_mtls_ca_file": "ca.pem"}, {"jax_distributed_verify_secure_credentials": True}],
)
def test_processes_that_shall_prove_who_they_are(told):
    with settings(jax_mtls_key_file=None, **told):
        pattern = (
            rf"^{next(iter(told))} would .* without encryption.*jax\.distributed\.initialize before"
        )
        with pytest.raises(LaunchError, match=pattern):
            coordination.check_settings()


def test_settings_that_say_nothing():
    with settings(jax_mtls_ca_file=None, jax_distributed_verify_secure_credentials=False):
        coordination.check_settings()
