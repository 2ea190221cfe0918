"""Facts about devices, each once, with its unit.

Read `gpus` first: limits of compute capabilities, and one record for each GPU. `device_model` makes the cost model's
devices of these. To support a device, add a record to `gpus.GPUS`, and to `CAPABILITIES` if its capability is new.
"""
