import jax.numpy as jnp
import optax
import pytest

import fedrecon as fr
from fedrecon.app.build import build_server, build_update
from fedrecon.app.config import Server, Update
from toy_models import descend, linear, one_round, xy


def test_a_gradient_longer_than_its_limit_is_shortened_to_it():
    """At w = b = 0 and (x, y) = (2, 5) the gradient in w is -20: cut to -1, a step of rate 0.5 adds 0.5."""

    def learned(clip_norm):
        update = build_update(Update(learning_rate=0.5, batch_size=1, clip_norm=clip_norm))
        algorithm = fr.federated_reconstruction(
            linear(), split=fr.split.none(), reconstruct=descend(0.1, steps=0), update=update, server=optax.sgd(1.0)
        )
        return float(one_round(algorithm, xy(([2], [5]))).params["w"])

    assert learned(1.0) == pytest.approx(0.5)
    assert learned(None) == pytest.approx(10.0)


def test_a_limit_of_the_gradient_that_allows_no_step_is_refused():
    with pytest.raises(ValueError, match=r"update.clip_norm is 0.0; it must be above 0"):
        Update(clip_norm=0.0)


def test_the_rate_of_the_server_falls_along_a_cosine_to_a_fiftieth():
    server = build_server(Server(optimizer="sgd", learning_rate=2.0, decay_rounds=2))
    params = jnp.zeros(())
    state, steps = server.init(params), []
    for _ in range(4):
        step, state = server.update(jnp.ones(()), state, params)
        steps.append(float(step))
    assert steps == pytest.approx([-2, -1.02, -0.04, -0.04])
