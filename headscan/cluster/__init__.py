"""headscan's work on many devices: placement, pools of replicas, Ray actors.

`placement_base` and `placements` choose where a model runs, on the `devices` that are free. `pool` defines a pool and
implements it in this process; `ray_pool` uses Ray, with `worker` inside the actors, `supervision` to replace those
that fail, and `streamed_pool` runs a model larger than memory. `ray_session` starts Ray or connects to it, and
`orphan_watch` ends the processes that a killed command leaves.

The import lets idle threads of torch sleep (`share_cores`): it sets ``GOMP_SPINCOUNT``, unless the user chose how
threads wait. That has no effect if torch was imported before.
"""

from headscan.cluster.devices import share_cores

share_cores()
