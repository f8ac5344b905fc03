"""The same member's app, all by name: nothing is imported before it is needed."""

import fedmerit.flower

app = fedmerit.flower.secure(
    "contract.client:inner", value="contract.task:value", gradient="contract.task:gradient", seed=0
)
