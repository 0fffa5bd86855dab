"""The oracle of tests of a step: a model trained on one device, in plain Flax and optax."""

from flax import nnx


def trained(model, optimizer, loss_fn, batches, wrt=nnx.Param) -> list[float]:
    """Trains the model in place by a step for each batch, and returns their losses.

    A step is compiled as a whole, which takes less than compiling its operations one by one.
    """
    state = nnx.Optimizer(model, optimizer, wrt=wrt)

    @nnx.jit
    def step(model, state, batch):
        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model, batch)
        state.update(model, grads)
        return loss

    return [float(step(model, state, batch)) for batch in batches]
