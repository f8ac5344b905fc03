"""A member."""

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedmerit.flower
from contract.task import gradient, own, train, value

inner = ClientApp()


def name_of(context):
    """Whose node this is; a simulated one is only numbered."""
    return context.node_config.get("name") or f"client-{context.node_config['partition-id']}"


def held_out(context):
    """The samples by which a member judges: here its own, whether or not it trains on them."""
    return own(name_of(context))


app = fedmerit.flower.secure(inner, value=value, gradient=gradient, held_out=held_out, seed=0)


@inner.train()
def train_locally(message, context):
    import torch  # noqa: F401  (Flower makes tensors only where torch is loaded already)

    state = message.content["arrays"].to_torch_state_dict()
    number = message.content["config"]["server-round"]
    state, samples = train(state, name_of(context), number)
    content = {"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": samples})}
    return Message(RecordDict(content), reply_to=message)
