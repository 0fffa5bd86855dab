"""A pytest plugin: `pytest --mesh dp=2,tp=2` runs marked tests on that mesh and on one device.

A test marked `mesh_invariant` takes `mesh`, and returns a function, or a pair of a function and its
arguments. It is called once for each mesh of the proof, and fails if the function is not the same
on all of them. Installing `axon_dist` registers the plugin; otherwise load it by
`-p axon_dist.prove.plugin`.
"""

from __future__ import annotations

from typing import Any

import pytest

_MARK = "mesh_invariant"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option `--mesh SIZES`, which may be repeated."""
    group = parser.getgroup("axon_dist")
    group.addoption(
        "--mesh",
        action="append",
        default=[],
        metavar="SIZES",
        help=f"prove tests marked {_MARK} on this mesh, as dp=2,tp=2; may be repeated",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declares the marker, and has JAX emulate the devices that the meshes need."""
    config.addinivalue_line(
        "markers",
        f"{_MARK}(*meshes): returns a function, or a function and its arguments, that is to be the "
        "same on each mesh as on one device",
    )
    meshes = config.getoption("--mesh")
    if meshes:
        import math  # noqa: PLC0415

        from ..mesh import World  # noqa: PLC0415
        from .meshes import sizes_of  # noqa: PLC0415

        World.emulate(max(math.prod(sizes_of(mesh).values()) for mesh in meshes))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Proves the function that a marked test returns."""
    mark = pyfuncitem.get_closest_marker(_MARK)
    if mark is None:
        return None
    meshes = list(pyfuncitem.config.getoption("--mesh") or ()) or list(mark.args)
    if not meshes:
        pytest.skip(f"no mesh: give --mesh dp=2,tp=2, or name one in @pytest.mark.{_MARK}")
    from .check import prove  # noqa: PLC0415

    given = dict(pyfuncitem.funcargs)
    test = pyfuncitem.obj
    names = pyfuncitem._fixtureinfo.argnames

    def make(mesh: Any) -> Any:
        fixtures = {name: given[name] for name in names if name != "mesh"}
        return test(**fixtures, **({"mesh": mesh} if "mesh" in names else {}))

    report = prove(make, meshes=meshes, name=pyfuncitem.name)
    if not report.ok:
        pytest.fail(str(report), pytrace=False)
    return True


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Any:
    """Provides the mesh of `--mesh`; a marked test gets each mesh of the proof in turn instead."""
    if request.node.get_closest_marker(_MARK) is not None:
        return None
    from .meshes import build_mesh, sizes_of  # noqa: PLC0415

    meshes = request.config.getoption("--mesh")
    if not meshes:
        pytest.skip("no mesh: give --mesh dp=2,tp=2")
    return build_mesh(sizes_of(meshes[0]))
