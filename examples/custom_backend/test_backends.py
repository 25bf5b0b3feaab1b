"""The suites that every backend passes, on these two; each has to be told how to build a backend only."""

from calm import CalmEngine
from remembering import RememberingBackend

from headway.contracts.config.model import ModelConfig
from inference_server.backends.base import GenerationBackend
from inference_server.testing import GenerationBackendContract
from trainer.testing import TrainEngineContract


class TestCalm(TrainEngineContract):
    make_engine = CalmEngine


class TestRemembering(GenerationBackendContract):
    def make_backend(self, model: ModelConfig, version: int) -> GenerationBackend:
        args = RememberingBackend.Args(kv_cache_bytes=1 << 26, num_threads=1)
        return RememberingBackend(args, model, version, None)
