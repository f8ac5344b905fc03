"""A hospital: an ordinary Flower ClientApp."""

import zlib

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedmerit.flower
from hospitals.task import local_data, network, own_data, train

app = ClientApp()


@app.train()
def train_locally(message: Message, context: Context) -> Message:
    """Train the received network on this hospital's images."""
    name = hospital(context)
    images, labels = local_data(name)
    net = network(message.content["arrays"])
    # from the same model the same update must not come twice, not even in another run
    number = message.content["config"]["server-round"]
    seed = zlib.crc32(f"{context.run_id} {number} {name}".encode())
    epochs, lr = context.run_config["local-epochs"], context.run_config["learning-rate"]
    loss = train(net, images, labels, epochs, lr, seed)
    metrics = MetricRecord({"num-examples": len(labels), "loss": loss})
    return Message(
        RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message
    )


def held_out(context: Context) -> tuple[np.ndarray, np.ndarray]:
    """By what this hospital judges the others in a panel."""
    return own_data(hospital(context))


def hospital(context: Context) -> str:
    """Whose node this is: whom it signs as."""
    return fedmerit.flower.member_of(context)
