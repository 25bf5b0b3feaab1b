# The public names with their types, as `__init__.py` loads them.

from headway.contracts.config.weight_sync import CheckpointSync as CheckpointSync
from headway.contracts.config.weight_sync import CollectiveSync as CollectiveSync
from headway.contracts.config.weight_sync import DiskSync as DiskSync
from headway.contracts.config.weight_sync import HttpSync as HttpSync
from headway.contracts.config.weight_sync import SharedMemorySync as SharedMemorySync
from weight_sync.adapter import make_adapter as make_adapter
from weight_sync.channel import WeightPublisher as WeightPublisher
from weight_sync.manifest import Base as Base
from weight_sync.publication import next_version as next_version
from weight_sync.publication import publish_next as publish_next
from weight_sync.transports.base import make_publisher as make_publisher
