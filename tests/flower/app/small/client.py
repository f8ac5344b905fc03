"""A member. What it trained is also noted in its own folder, for the test to compare with."""

from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedmerit.flower
from small.task import local_data, probability_of_truth, train

app = fedmerit.flower.secure(ClientApp(), value=probability_of_truth)


@app.train()
def train_locally(message, context):
    images, labels = local_data(context.node_config["part"], context.run_config["members"])
    first = message.content["arrays"].to_numpy_ndarrays()
    trained = train(first, images, labels)
    number = message.content["config"]["server-round"]
    np.savez(Path(context.node_config["notes"]) / f"round-{number}.npz", *first, *trained)
    metrics = MetricRecord({"num-examples": len(labels)})
    return Message(RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics}), reply_to=message)
