"""The hospital's app, secured. All is named, not imported: most messages need neither torch nor the data."""

import fedmerit.flower

app = fedmerit.flower.secure(
    "hospitals.client_app:app",
    value="hospitals.task:value",
    gradient="hospitals.task:gradient",
    held_out="hospitals.client_app:held_out",
)
