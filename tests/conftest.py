import os

# Nothing in the suite may reach for the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
# The models are tiny: a second thread would only wait for the first, and the suite runs on all cores by processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray would run its workers behind the suite's other process, and they would hardly come to anything.
os.environ.setdefault("RAY_worker_niceness", "0")
