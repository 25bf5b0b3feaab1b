"""Every path and header of ours, and which role may call what: the only place where a URL is spelled."""

from __future__ import annotations

from collections.abc import Mapping

from headway.contracts.config.gateway import Role

HEALTH = "/health"
METRICS = "/metrics"
STATUS = "/v1/status"
GENERATE = "/v1/generate"
GENERATE_STREAM = "/v1/generate/stream"
GENERATION_ABORT = "/v1/generation/abort"
GENERATION_PAUSE = "/v1/generation/pause"
GENERATION_RESUME = "/v1/generation/resume"
GENERATION_FLUSH = "/v1/generation/flush"
ROLLOUTS = "/v1/rollouts"
ROLLOUTS_WAIT = "/v1/rollouts/wait"
ROLLOUTS_CONSUMED = "/v1/rollouts/consumed"
ROLLOUTS_CANCEL = "/v1/rollouts/cancel"
ROLLOUTS_STREAM = "/v1/rollouts/stream"
ROLLOUT = "/v1/rollouts/{rollout_id}"
WORKFLOWS = "/v1/workflows"
REWARDS = "/v1/rewards"
REWARDS_SCORE = "/v1/rewards/score"
FILTERS = "/v1/filters"
TOOLS = "/v1/tools"
SESSIONS = "/v1/sessions"
SESSION = "/v1/sessions/{session_id}"
SESSION_END = "/v1/sessions/{session_id}/end"
SESSION_OPENAI = "/v1/sessions/{session_id}/openai/v1"
"""Base URL of an OpenAI client: `/chat/completions` and `/responses` below it."""
SESSION_ANTHROPIC = "/v1/sessions/{session_id}/anthropic"
"""Base URL of an Anthropic client: `/v1/messages` below it."""
SESSION_PATHS = f"{SESSIONS}/"
"""Prefix of the paths that ask for the key of their session, and for no token of the service."""
SCALE = "/v1/scale"
SERVERS_DRAIN = "/v1/servers/drain"
LEDGER_REQUEUE = "/v1/ledger/requeue"
UI = "/ui"
UI_FILE = "/ui/{name}"
DASHBOARD = "/v1/dashboard"
CONSUMER = "/v1/consumer"
LEDGER = "/v1/ledger"
WEIGHTS = "/v1/weights"
WEIGHTS_PREPARE = "/v1/weights/prepare"
WEIGHTS_COMMIT = "/v1/weights/commit"
WEIGHTS_ABORT = "/v1/weights/abort"
WEIGHTS_RELAY = "/v1/weights/relay"
WEIGHTS_PIN = "/v1/weights/pin"
WEIGHTS_ROLLBACK = "/v1/weights/rollback"
WEIGHTS_RESERVATION = "/v1/weights/reservation"
WEIGHTS_HELD = "/v1/weights/held/{version}/{blob}"
"""Weights that a server holds, laid out as a version directory: peers fetch from `held_root`."""
ADAPTERS = "/v1/adapters"
ADAPTER = "/v1/adapters/{name}"
SERVERS = "/v1/servers"
MODELS = "/v1/models"
MODEL = "/v1/models/{model}"
COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"
# SGLang's, for clients that were written for it.
SGLANG_GENERATE = "/generate"
SGLANG_HEALTH = "/health_generate"
SGLANG_READY = "/ready"
SGLANG_PING = "/ping"
SGLANG_MODEL = "/model_info"
SGLANG_MODEL_OLD = "/get_model_info"
SGLANG_SERVER = "/server_info"
SGLANG_SERVER_OLD = "/get_server_info"
SGLANG_VERSION_OLD = "/get_weight_version"
SGLANG_LOADS = "/v1/loads"
SGLANG_LOAD_OLD = "/get_load"
SGLANG_PAUSE = "/pause_generation"
SGLANG_CONTINUE = "/continue_generation"
SGLANG_FLUSH = "/flush_cache"
SGLANG_ABORT = "/abort_request"
SGLANG_UPDATE_DISK = "/update_weights_from_disk"
SGLANG_PULL = "/pull_weights"
SGLANG_GROUP_INIT = "/init_weights_update_group"
SGLANG_GROUP_DESTROY = "/destroy_weights_update_group"
SGLANG_UPDATE_GROUP = "/update_weights_from_distributed"
SGLANG_UPDATE_BEGIN = "/begin_weight_update"
SGLANG_UPDATE_END = "/end_weight_update"
SGLANG_POST_PROCESS = "/post_process_weights"
SGLANG_RELABEL = "/update_weight_version"
SGLANG_WEIGHTS = "/get_weights_by_name"
SGLANG_CHECKER = "/weights_checker"
SGLANG_LORA_LOAD = "/load_lora_adapter"
SGLANG_LORA_UNLOAD = "/unload_lora_adapter"
SGLANG_MEMORY_RELEASE = "/release_memory_occupation"
SGLANG_MEMORY_RESUME = "/resume_memory_occupation"
SGLANG_TOKENIZE = "/tokenize"
SGLANG_DETOKENIZE = "/detokenize"
# vLLM's, likewise.
VLLM_GENERATE = "/inference/v1/generate"
VLLM_ABORT = "/abort_requests"
VLLM_PAUSE = "/pause"
VLLM_RESUME = "/resume"
VLLM_IS_PAUSED = "/is_paused"
VLLM_RESET_PREFIXES = "/reset_prefix_cache"
VLLM_WEIGHT_INFO = "/weight_info"
VLLM_WORLD_SIZE = "/get_world_size"
VLLM_VERSION = "/version"
VLLM_CALL = "/collective_rpc"
VLLM_INIT_TRANSFER = "/init_weight_transfer_engine"
VLLM_BEGIN_TRANSFER = "/start_weight_update"
VLLM_TRANSFER = "/update_weights"
VLLM_END_TRANSFER = "/finish_weight_update"
VLLM_LORA_LOAD = "/v1/load_lora_adapter"
VLLM_LORA_UNLOAD = "/v1/unload_lora_adapter"

REQUEST_ID_HEADER = "x-request-id"
READY_HEADER = "x-headway-ready"
"""On an empty `wait` answer (204): how many finished groups could have been given out."""

OPEN_PATHS = (HEALTH, SGLANG_PING, SGLANG_READY, UI)
"""Answered without a token: probes hold no secrets, nor does the dashboard's page, which asks for one."""
OPEN_PREFIXES = (SESSION_PATHS, f"{UI}/")
"""Prefixes of the paths that are answered without a token of the service."""

OPENAPI = "/openapi.json"
OPENAPI_PAGES = ("/docs", "/docs/oauth2-redirect", "/redoc")

_ROUTES: Mapping[Role, tuple[tuple[str, ...], ...]] = {
    "submit": (
        ("GET", METRICS, STATUS, SCALE, LEDGER, ROLLOUTS, ROLLOUT, WEIGHTS, DASHBOARD),
        ("GET", WORKFLOWS, REWARDS, FILTERS, TOOLS),
        ("POST", GENERATE, GENERATE_STREAM, ROLLOUTS, SESSIONS, REWARDS_SCORE),
        ("GET", MODELS, MODEL, ADAPTERS, OPENAPI, *OPENAPI_PAGES),
        ("POST", COMPLETIONS, CHAT_COMPLETIONS),
        ("POST", SGLANG_GENERATE, SGLANG_TOKENIZE, SGLANG_DETOKENIZE),
        ("PUT", SGLANG_GENERATE),
        ("GET", SGLANG_HEALTH, SGLANG_MODEL, SGLANG_MODEL_OLD, SGLANG_LOADS),
        ("GET", SGLANG_SERVER, SGLANG_SERVER_OLD, SGLANG_VERSION_OLD, SGLANG_LOAD_OLD),
        ("POST", VLLM_GENERATE),
        ("GET", VLLM_IS_PAUSED, VLLM_WEIGHT_INFO, VLLM_WORLD_SIZE, VLLM_VERSION),
    ),
    "consume": (
        ("POST", ROLLOUTS_WAIT, ROLLOUTS_CONSUMED, ROLLOUTS_CANCEL, CONSUMER, WEIGHTS),
        ("POST", WEIGHTS_RESERVATION),
        ("DELETE", CONSUMER, WEIGHTS, WEIGHTS_RESERVATION),
        ("GET", ROLLOUTS_STREAM, WEIGHTS_HELD),
    ),
    "server": (("POST", SERVERS),),
    "admin": (
        ("POST", SERVERS_DRAIN, LEDGER_REQUEUE, WEIGHTS_PIN, WEIGHTS_ROLLBACK),
        ("POST", WEIGHTS_PREPARE, WEIGHTS_COMMIT, WEIGHTS_ABORT, WEIGHTS_RELAY),
        ("POST", GENERATION_ABORT, GENERATION_PAUSE, GENERATION_RESUME, GENERATION_FLUSH),
        ("POST", SGLANG_PAUSE, SGLANG_CONTINUE, SGLANG_FLUSH, SGLANG_ABORT),
        ("POST", SGLANG_UPDATE_DISK, SGLANG_PULL, SGLANG_UPDATE_GROUP, SGLANG_RELABEL),
        ("POST", SGLANG_GROUP_INIT, SGLANG_GROUP_DESTROY),
        ("POST", SGLANG_UPDATE_BEGIN, SGLANG_UPDATE_END, SGLANG_POST_PROCESS),
        ("POST", SGLANG_MEMORY_RELEASE, SGLANG_MEMORY_RESUME),
        ("POST", SGLANG_LORA_LOAD, SGLANG_LORA_UNLOAD),
        ("POST", VLLM_ABORT, VLLM_PAUSE, VLLM_RESUME, VLLM_RESET_PREFIXES, VLLM_CALL),
        ("POST", VLLM_INIT_TRANSFER, VLLM_BEGIN_TRANSFER, VLLM_TRANSFER, VLLM_END_TRANSFER),
        ("POST", VLLM_LORA_LOAD, VLLM_LORA_UNLOAD),
        ("PUT", ADAPTER),
        ("DELETE", ADAPTER),
        ("POST", SGLANG_WEIGHTS, SGLANG_CHECKER),
        ("GET", SGLANG_WEIGHTS, SGLANG_FLUSH),
    ),
}
ACCESS: Mapping[str, Role] = {
    f"{method} {path}": role
    for role, rows in _ROUTES.items()
    for method, *paths in rows
    for path in paths
}
"""`METHOD path` -> the role that it asks for. What is not here asks for `admin`."""
ROUTINE = frozenset({f"POST {SERVERS}", f"POST {ROLLOUTS_WAIT}", f"POST {WEIGHTS_RESERVATION}"})
"""Sent over and over by our own processes: no line of the audit log each."""
