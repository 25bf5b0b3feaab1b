PRAGMA user_version = 2;
PRAGMA application_id = 0;
BEGIN TRANSACTION;
CREATE TABLE events (
    rollout INTEGER NOT NULL,
    number INTEGER NOT NULL,
    event TEXT NOT NULL,
    detail TEXT,
    at REAL NOT NULL,
    PRIMARY KEY (rollout, number)
) WITHOUT ROWID;
INSERT INTO "events" VALUES(1,1,'submit',NULL,1.79551543017486262324e+09);
INSERT INTO "events" VALUES(1,2,'lease','attempt=1 version=1 owner=one',1.79551543017529511452e+09);
INSERT INTO "events" VALUES(1,3,'complete','oldest_version=1',1.79551543017618536954e+09);
INSERT INTO "events" VALUES(1,4,'deliver','version=1 oldest_version=1',1.79551543017784810069e+09);
INSERT INTO "events" VALUES(1,5,'consume','step=0',1.79551543017811822888e+09);
INSERT INTO "events" VALUES(2,1,'submit',NULL,1795515430.17665);
INSERT INTO "events" VALUES(2,2,'lease','attempt=1 version=1 owner=one',1.7955154301768023968e+09);
INSERT INTO "events" VALUES(2,3,'complete','oldest_version=1',1.79551543017718601225e+09);
INSERT INTO "events" VALUES(2,4,'deliver','version=1 oldest_version=1',1.7955154301783385277e+09);
INSERT INTO "events" VALUES(2,5,'give_back','checkpoint_step=0',1.79551543018099641797e+09);
INSERT INTO "events" VALUES(2,6,'deliver','version=1 oldest_version=1',1.79551543018709635736e+09);
INSERT INTO "events" VALUES(3,1,'submit',NULL,1.79551543017737436297e+09);
INSERT INTO "events" VALUES(3,2,'lease','attempt=1 version=1 owner=one',1.79551543017748308178e+09);
INSERT INTO "events" VALUES(3,3,'complete','oldest_version=1',1.79551543017774200444e+09);
INSERT INTO "events" VALUES(3,4,'deliver','version=1 oldest_version=1',1.7955154301783385277e+09);
INSERT INTO "events" VALUES(3,5,'give_back','checkpoint_step=0',1.79551543018099641797e+09);
INSERT INTO "events" VALUES(4,1,'submit',NULL,1.79551543017854404451e+09);
INSERT INTO "events" VALUES(4,2,'lease','attempt=1 version=2 owner=one',1.79551543017864894866e+09);
INSERT INTO "events" VALUES(4,3,'complete','oldest_version=2',1.79551543017901062962e+09);
INSERT INTO "events" VALUES(5,1,'submit',NULL,1.79551543017925310137e+09);
INSERT INTO "events" VALUES(5,2,'lease','attempt=1 version=0 owner=one',1.79551543017941284182e+09);
INSERT INTO "events" VALUES(5,3,'fail','workflow: it raised',1.79551543017966151239e+09);
INSERT INTO "events" VALUES(6,1,'submit',NULL,1.79551543017925310137e+09);
INSERT INTO "events" VALUES(6,2,'lease','attempt=1 version=0 owner=one',1.79551543017941284182e+09);
INSERT INTO "events" VALUES(6,3,'filter','reward_spread: 0 is below 0.1',1.79551543017981839181e+09);
INSERT INTO "events" VALUES(7,1,'submit',NULL,1.79551543017925310137e+09);
INSERT INTO "events" VALUES(7,2,'lease','attempt=1 version=0 owner=one',1.79551543017941284182e+09);
INSERT INTO "events" VALUES(8,1,'submit',NULL,1.79551543017994642264e+09);
CREATE TABLE forgotten (
    state TEXT PRIMARY KEY,
    trajectories INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE notes (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID
;
INSERT INTO "notes" VALUES('consumer','{"term":1,"request":{"consumer":"default","batch_size":2,"max_staleness":1,"step":0,"version":1},"base":0}');
INSERT INTO "notes" VALUES('owner of default','trainer');
INSERT INTO "notes" VALUES('sessions/51','{"leased": {"session_id": "s1", "rollout_id": "leased", "api_key": "k", "openai_url": "http://a/openai/v1", "anthropic_url": "http://a/anthropic", "end_url": "http://a/end", "expires_in_s": 60.0}}');
INSERT INTO "notes" VALUES('weights','{"epoch":1795515430189,"num_asked":2,"head":2,"committed":{"version":2,"path":"file:/weights/2","digest":"0000000000000000000000000000000000000000000000000000000000000002"},"pinned":1,"kept":[{"version":1,"path":"file:/weights/1","digest":"0000000000000000000000000000000000000000000000000000000000000001"},{"version":2,"path":"file:/weights/2","digest":"0000000000000000000000000000000000000000000000000000000000000002"}],"swapped":["server-1","server-2"],"reserved":{"name":"evaluator","version":1,"servers":1},"seats":["server-2"],"repeats":1}');
CREATE TABLE numbers (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO "numbers" VALUES('revision',36);
CREATE TABLE payloads (seq INTEGER PRIMARY KEY, payload BLOB NOT NULL);
INSERT INTO "payloads" VALUES(2,X'78020000000000007B225F5F6D657461646174615F5F223A7B22736368656D615F76657273696F6E223A2232222C227472616A6563746F72696573223A227B5C2267726F7570735C223A5B5B5C227265706C617965645C222C5C22672D7265706C617965645C222C325D5D2C5C2273616D706C655F696E6465785C223A5B302C315D2C5C2273746F705F726561736F6E5C223A5B5C2273746F705C222C5C2273746F705C225D2C5C22766572646963745C223A5B5C2273636F7265645C222C5C2273636F7265645C225D2C5C2264657461696C735C223A5B7B7D2C7B7D5D2C5C227475726E735C223A5B5B5D2C5B5D5D2C5C226272616E63685C223A5B302C305D7D227D2C226C656E67746873223A7B226474797065223A22493634222C227368617065223A5B325D2C22646174615F6F666673657473223A5B302C31365D7D2C226C6F6770726F6273223A7B226474797065223A22463332222C227368617065223A5B365D2C22646174615F6F666673657473223A5B31362C34305D7D2C2272657761726473223A7B226474797065223A22463332222C227368617065223A5B325D2C22646174615F6F666673657473223A5B34302C34385D7D2C22696E7075745F696473223A7B226474797065223A22493332222C227368617065223A5B365D2C22646174615F6F666673657473223A5B34382C37325D7D2C2276657273696F6E73223A7B226474797065223A22493332222C227368617065223A5B365D2C22646174615F6F666673657473223A5B37322C39365D7D2C226C6F73735F6D61736B223A7B226474797065223A22424F4F4C222C227368617065223A5B365D2C22646174615F6F666673657473223A5B39362C3130325D7D7D2020202020200300000000000000030000000000000000000000000000BF000000BF00000000000000BF000000BF0000803F0000803F000000000100000002000000000000000100000002000000FFFFFFFF0100000001000000FFFFFFFF0100000001000000000101000101');
INSERT INTO "payloads" VALUES(3,X'78020000000000007B225F5F6D657461646174615F5F223A7B22736368656D615F76657273696F6E223A2232222C227472616A6563746F72696573223A227B5C2267726F7570735C223A5B5B5C2264656C6976657265645C222C5C22672D64656C6976657265645C222C325D5D2C5C2273616D706C655F696E6465785C223A5B302C315D2C5C2273746F705F726561736F6E5C223A5B5C2273746F705C222C5C2273746F705C225D2C5C22766572646963745C223A5B5C2273636F7265645C222C5C2273636F7265645C225D2C5C2264657461696C735C223A5B7B7D2C7B7D5D2C5C227475726E735C223A5B5B5D2C5B5D5D2C5C226272616E63685C223A5B302C305D7D227D2C226C656E67746873223A7B226474797065223A22493634222C227368617065223A5B325D2C22646174615F6F666673657473223A5B302C31365D7D2C226C6F6770726F6273223A7B226474797065223A22463332222C227368617065223A5B365D2C22646174615F6F666673657473223A5B31362C34305D7D2C2272657761726473223A7B226474797065223A22463332222C227368617065223A5B325D2C22646174615F6F666673657473223A5B34302C34385D7D2C22696E7075745F696473223A7B226474797065223A22493332222C227368617065223A5B365D2C22646174615F6F666673657473223A5B34382C37325D7D2C2276657273696F6E73223A7B226474797065223A22493332222C227368617065223A5B365D2C22646174615F6F666673657473223A5B37322C39365D7D2C226C6F73735F6D61736B223A7B226474797065223A22424F4F4C222C227368617065223A5B365D2C22646174615F6F666673657473223A5B39362C3130325D7D7D202020200300000000000000030000000000000000000000000000BF000000BF00000000000000BF000000BF0000803F0000803F000000000100000002000000000000000100000002000000FFFFFFFF0100000001000000FFFFFFFF0100000001000000000101000101');
INSERT INTO "payloads" VALUES(4,X'70020000000000007B225F5F6D657461646174615F5F223A7B22736368656D615F76657273696F6E223A2232222C227472616A6563746F72696573223A227B5C2267726F7570735C223A5B5B5C2272656164795C222C5C22672D72656164795C222C325D5D2C5C2273616D706C655F696E6465785C223A5B302C315D2C5C2273746F705F726561736F6E5C223A5B5C2273746F705C222C5C2273746F705C225D2C5C22766572646963745C223A5B5C2273636F7265645C222C5C2273636F7265645C225D2C5C2264657461696C735C223A5B7B7D2C7B7D5D2C5C227475726E735C223A5B5B5D2C5B5D5D2C5C226272616E63685C223A5B302C305D7D227D2C226C656E67746873223A7B226474797065223A22493634222C227368617065223A5B325D2C22646174615F6F666673657473223A5B302C31365D7D2C226C6F6770726F6273223A7B226474797065223A22463332222C227368617065223A5B365D2C22646174615F6F666673657473223A5B31362C34305D7D2C2272657761726473223A7B226474797065223A22463332222C227368617065223A5B325D2C22646174615F6F666673657473223A5B34302C34385D7D2C22696E7075745F696473223A7B226474797065223A22493332222C227368617065223A5B365D2C22646174615F6F666673657473223A5B34382C37325D7D2C2276657273696F6E73223A7B226474797065223A22493332222C227368617065223A5B365D2C22646174615F6F666673657473223A5B37322C39365D7D2C226C6F73735F6D61736B223A7B226474797065223A22424F4F4C222C227368617065223A5B365D2C22646174615F6F666673657473223A5B39362C3130325D7D7D202020200300000000000000030000000000000000000000000000BF000000BF00000000000000BF000000BF0000803F0000803F000000000100000002000000000000000100000002000000FFFFFFFF0200000002000000FFFFFFFF0200000002000000000101000101');
CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    consumer TEXT NOT NULL,
    request TEXT NOT NULL,
    size INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    min_version INTEGER NOT NULL,
    state TEXT NOT NULL,
    num_events INTEGER NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,
    fence INTEGER NOT NULL DEFAULT 0,
    report TEXT,
    owner TEXT,
    expires REAL,
    admitted INTEGER,
    oldest_version INTEGER,
    staleness INTEGER,
    mean_reward REAL,
    reason TEXT,
    delivery_id TEXT,
    step INTEGER,
    has_payload INTEGER NOT NULL DEFAULT 0,
    submitted_at REAL NOT NULL,
    since REAL NOT NULL,
    timeout_s REAL,
    deadline REAL,
    changed_at REAL NOT NULL
);
INSERT INTO "rollouts" VALUES(1,'consumed','default','{"rollout_id":"consumed","consumer":"default","prompt":{"group_id":"g-consumed","group_size":2,"text":null,"messages":null,"input_ids":[1,2,3],"data":{"answer":"x"}},"workflow":{"name":"single_turn","args":{},"version":null},"reward":{"name":"exact","args":{}},"gconfig":{"max_new_tokens":256,"min_new_tokens":0,"temperature":1.0,"top_p":1.0,"top_k":null,"min_p":0.0,"stop_token_ids":[],"stop":[],"ignore_eos":false,"presence_penalty":0.0,"frequency_penalty":0.0,"repetition_penalty":1.0,"logit_bias":{},"seed":null},"filter":null,"priority":0,"timeout_s":null,"versions":{"min_version":null,"max_version":null,"pin":false}}',2,0,0,'consumed',5,1,1,'complete','one',1.79551546017529511456e+09,1,1,0,1.0,NULL,'d0',0,0,1.79551543017486262324e+09,1.79551543017486262324e+09,NULL,NULL,1.79551543017811822888e+09);
INSERT INTO "rollouts" VALUES(2,'replayed','default','{"rollout_id":"replayed","consumer":"default","prompt":{"group_id":"g-replayed","group_size":2,"text":null,"messages":null,"input_ids":[1,2,3],"data":{"answer":"x"}},"workflow":{"name":"single_turn","args":{},"version":null},"reward":{"name":"exact","args":{}},"gconfig":{"max_new_tokens":256,"min_new_tokens":0,"temperature":1.0,"top_p":1.0,"top_k":null,"min_p":0.0,"stop_token_ids":[],"stop":[],"ignore_eos":false,"presence_penalty":0.0,"frequency_penalty":0.0,"repetition_penalty":1.0,"logit_bias":{},"seed":null},"filter":null,"priority":0,"timeout_s":null,"versions":{"min_version":null,"max_version":null,"pin":false}}',2,0,0,'delivered',6,0,1,'complete','one',1.7955154601768023968e+09,1,1,0,1.0,NULL,'d2',NULL,1,1795515430.17665,1.79551543018099641797e+09,NULL,NULL,1.79551543018709635736e+09);
INSERT INTO "rollouts" VALUES(3,'delivered','default','{"rollout_id":"delivered","consumer":"default","prompt":{"group_id":"g-delivered","group_size":2,"text":null,"messages":null,"input_ids":[1,2,3],"data":{"answer":"x"}},"workflow":{"name":"single_turn","args":{},"version":null},"reward":{"name":"exact","args":{}},"gconfig":{"max_new_tokens":256,"min_new_tokens":0,"temperature":1.0,"top_p":1.0,"top_k":null,"min_p":0.0,"stop_token_ids":[],"stop":[],"ignore_eos":false,"presence_penalty":0.0,"frequency_penalty":0.0,"repetition_penalty":1.0,"logit_bias":{},"seed":null},"filter":null,"priority":0,"timeout_s":null,"versions":{"min_version":null,"max_version":null,"pin":false}}',2,0,0,'ready',5,0,1,'complete','one',1.79551546017748308182e+09,1,1,NULL,1.0,NULL,NULL,NULL,1,1.79551543017737436297e+09,1.79551543018099641797e+09,NULL,NULL,1.79551543018099641797e+09);
INSERT INTO "rollouts" VALUES(4,'ready','other','{"rollout_id":"ready","consumer":"other","prompt":{"group_id":"g-ready","group_size":2,"text":null,"messages":null,"input_ids":[1,2,3],"data":{"answer":"x"}},"workflow":{"name":"single_turn","args":{},"version":null},"reward":{"name":"exact","args":{}},"gconfig":{"max_new_tokens":256,"min_new_tokens":0,"temperature":1.0,"top_p":1.0,"top_k":null,"min_p":0.0,"stop_token_ids":[],"stop":[],"ignore_eos":false,"presence_penalty":0.0,"frequency_penalty":0.0,"repetition_penalty":1.0,"logit_bias":{},"seed":null},"filter":null,"priority":0,"timeout_s":null,"versions":{"min_version":null,"max_version":null,"pin":false}}',2,0,0,'ready',3,1,1,'complete','one',1.7955154601786489487e+09,2,2,NULL,1.0,NULL,NULL,NULL,1,1.79551543017854404451e+09,1.79551543017854404451e+09,NULL,NULL,1.79551543017901062962e+09);
INSERT INTO "rollouts" VALUES(5,'failed','other','{"rollout_id":"failed","consumer":"other","prompt":{"group_id":"g-failed","group_size":2,"text":null,"messages":null,"input_ids":[1,2,3],"data":{"answer":"x"}},"workflow":{"name":"single_turn","args":{},"version":null},"reward":{"name":"exact","args":{}},"gconfig":{"max_new_tokens":256,"min_new_tokens":0,"temperature":1.0,"top_p":1.0,"top_k":null,"min_p":0.0,"stop_token_ids":[],"stop":[],"ignore_eos":false,"presence_penalty":0.0,"frequency_penalty":0.0,"repetition_penalty":1.0,"logit_bias":{},"seed":null},"filter":null,"priority":0,"timeout_s":null,"versions":{"min_version":null,"max_version":null,"pin":false}}',2,0,0,'failed',3,1,1,'fail','one',1.79551546017941284177e+09,0,NULL,NULL,NULL,'workflow: it raised',NULL,NULL,0,1.79551543017925310137e+09,1.79551543017925310137e+09,NULL,NULL,1.79551543017966151239e+09);
INSERT INTO "rollouts" VALUES(6,'filtered','other','{"rollout_id":"filtered","consumer":"other","prompt":{"group_id":"g-filtered","group_size":2,"text":null,"messages":null,"input_ids":[1,2,3],"data":{"answer":"x"}},"workflow":{"name":"single_turn","args":{},"version":null},"reward":{"name":"exact","args":{}},"gconfig":{"max_new_tokens":256,"min_new_tokens":0,"temperature":1.0,"top_p":1.0,"top_k":null,"min_p":0.0,"stop_token_ids":[],"stop":[],"ignore_eos":false,"presence_penalty":0.0,"frequency_penalty":0.0,"repetition_penalty":1.0,"logit_bias":{},"seed":null},"filter":null,"priority":0,"timeout_s":null,"versions":{"min_version":null,"max_version":null,"pin":false}}',2,0,0,'filtered',3,1,1,'filter','one',1.79551546017941284177e+09,0,NULL,NULL,0.0,'reward_spread: 0 is below 0.1',NULL,NULL,0,1.79551543017925310137e+09,1.79551543017925310137e+09,NULL,NULL,1.79551543017981839181e+09);
INSERT INTO "rollouts" VALUES(7,'leased','other','{"rollout_id":"leased","consumer":"other","prompt":{"group_id":"g-leased","group_size":2,"text":null,"messages":null,"input_ids":[1,2,3],"data":{"answer":"x"}},"workflow":{"name":"single_turn","args":{},"version":null},"reward":{"name":"exact","args":{}},"gconfig":{"max_new_tokens":256,"min_new_tokens":0,"temperature":1.0,"top_p":1.0,"top_k":null,"min_p":0.0,"stop_token_ids":[],"stop":[],"ignore_eos":false,"presence_penalty":0.0,"frequency_penalty":0.0,"repetition_penalty":1.0,"logit_bias":{},"seed":null},"filter":null,"priority":0,"timeout_s":null,"versions":{"min_version":null,"max_version":null,"pin":false}}',2,0,0,'leased',2,1,1,NULL,'one',1.79551546017941284177e+09,0,NULL,NULL,NULL,NULL,NULL,NULL,0,1.79551543017925310137e+09,1.79551543017925310137e+09,NULL,NULL,1.79551543017941284182e+09);
INSERT INTO "rollouts" VALUES(8,'queued','other','{"rollout_id":"queued","consumer":"other","prompt":{"group_id":"g-queued","group_size":3,"text":null,"messages":null,"input_ids":[1,2,3],"data":{"answer":"x"}},"workflow":{"name":"single_turn","args":{},"version":null},"reward":{"name":"exact","args":{}},"gconfig":{"max_new_tokens":256,"min_new_tokens":0,"temperature":1.0,"top_p":1.0,"top_k":null,"min_p":0.0,"stop_token_ids":[],"stop":[],"ignore_eos":false,"presence_penalty":0.0,"frequency_penalty":0.0,"repetition_penalty":1.0,"logit_bias":{},"seed":null},"filter":null,"priority":2,"timeout_s":null,"versions":{"min_version":null,"max_version":null,"pin":false}}',3,2,0,'queued',1,0,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,1.79551543017994642264e+09,1.79551543017994642264e+09,NULL,NULL,1.79551543017994642264e+09);
CREATE TABLE tallies (
    state TEXT NOT NULL,
    consumer TEXT NOT NULL,
    num_groups INTEGER NOT NULL,
    trajectories INTEGER NOT NULL,
    PRIMARY KEY (state, consumer)
) WITHOUT ROWID;
INSERT INTO "tallies" VALUES('consumed','',1,2);
INSERT INTO "tallies" VALUES('consumed','default',1,2);
INSERT INTO "tallies" VALUES('delivered','',1,2);
INSERT INTO "tallies" VALUES('delivered','default',1,2);
INSERT INTO "tallies" VALUES('failed','',1,2);
INSERT INTO "tallies" VALUES('failed','other',1,2);
INSERT INTO "tallies" VALUES('filtered','',1,2);
INSERT INTO "tallies" VALUES('filtered','other',1,2);
INSERT INTO "tallies" VALUES('leased','',1,2);
INSERT INTO "tallies" VALUES('leased','default',0,0);
INSERT INTO "tallies" VALUES('leased','other',1,2);
INSERT INTO "tallies" VALUES('queued','',1,3);
INSERT INTO "tallies" VALUES('queued','default',0,0);
INSERT INTO "tallies" VALUES('queued','other',1,3);
INSERT INTO "tallies" VALUES('ready','',2,4);
INSERT INTO "tallies" VALUES('ready','default',1,2);
INSERT INTO "tallies" VALUES('ready','other',1,2);
CREATE INDEX of_consumer ON rollouts (consumer, seq);
CREATE INDEX queued ON rollouts (consumer, priority DESC, seq, min_version, size)
    WHERE state = 'queued';
CREATE INDEX leased ON rollouts (consumer, admitted) WHERE state = 'leased';
CREATE INDEX ready ON rollouts (consumer, oldest_version, seq) WHERE state = 'ready';
CREATE INDEX in_line ON rollouts (consumer, seq) WHERE state = 'ready';
CREATE INDEX delivered ON rollouts (consumer) WHERE state = 'delivered';
CREATE INDEX consumed ON rollouts (consumer, has_payload, step) WHERE state = 'consumed';
CREATE INDEX ended ON rollouts (state, changed_at) WHERE state IN ('consumed', 'failed', 'filtered', 'stale', 'cancelled');
CREATE INDEX deliveries ON rollouts (delivery_id) WHERE delivery_id IS NOT NULL;
CREATE INDEX deadlines ON rollouts (deadline) WHERE deadline IS NOT NULL AND state IN ('queued', 'leased');
CREATE INDEX waiting ON tallies (consumer) WHERE state = 'queued' AND num_groups > 0;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('rollouts',8);
COMMIT;
