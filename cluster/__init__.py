"""headscan's work on many devices: placement, pools of replicas, Ray actors."""
