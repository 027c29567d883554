"""Every method of `fedrecon.algorithms` with small settings, for tests that run over all of them."""

import fedrecon as fr
from toy_models import lookup_model

WHOLE = ("scaffold", "ditto", "fedprox", "reptile", "per_fedavg", "pfedme", "apfl")  # train models without local parts
SPLIT = ("fedper", "fedsim", "lg_fedavg", "fedalt", "fedrep", "fedbn", "fedbabu", "fedmf", "fedncf", "pfedrec")
RELATIVES = WHOLE + SPLIT


def descend(rate=0.1, **options):
    return fr.gradient_descent(fr.optimizers.sgd(rate), batch_size=2, **options)


def model_of(name, lookups=True):
    """The lookup model, with its local part as a global one for methods that train whole models."""
    model = lookup_model(lookups)
    if name not in WHOLE:
        return model
    return fr.Model(
        init_global=lambda key: {"model": model.init_global(key), "own": model.init_local(key)},
        init_local=lambda key: (),
        predict=lambda params, local, batch: model.predict(params["model"], params["own"], batch),
        loss=model.loss,
        metrics=model.metrics,
        lookups={f"model/{path}": features for path, features in model.lookups.items()},
    )


def make(name, model):
    sgd = fr.optimizers.sgd(0.9)
    split = {"update": descend(), "server": sgd, "reconstruct": descend()}
    settings = {
        "scaffold": {"learning_rate": 0.1, "batch_size": 2, "num_clients": 5, "server": sgd},
        "ditto": {"update": descend(), "personal": descend(0.2), "strength": 0.3, "server": sgd},
        "fedprox": {"update": descend(), "strength": 0.3, "server": sgd},
        "reptile": {"update": descend(), "learning_rate": 0.5, "finetune": descend()},
        "per_fedavg": {"adapt": descend(0.05, steps=2), "update": descend(), "server": sgd},
        "pfedme": {"update": descend(), "personal": fr.optimizers.sgd(0.2), "steps": 3, "strength": 1.5, "server": sgd},
        "apfl": {"update": descend(), "server": sgd},
        "fedalt": {"personal": descend(), "update": descend(), "server": sgd},
        "fedrep": {"head": descend(epochs=3), "body": descend(), "server": sgd},
        "fedbabu": {"head": descend(), "update": descend(), "server": sgd},
        "pfedrec": {"personal": descend(), "update": descend(), "server": sgd},
    }
    return getattr(fr.algorithms, name)(model, **settings.get(name, split))
