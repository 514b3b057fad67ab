import pytest
import torch


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield
