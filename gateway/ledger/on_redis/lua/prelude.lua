-- Comes before every script. KEYS[1] is the prefix, ARGV[1] the id of the call ('' for a read).
local P = KEYS[1] .. ':'
local function key(name, of) return P .. NAMES[name] .. (of or '') end

-- A call whose answer was lost is repeated with its id, and answered again.
if ARGV[1] ~= '' then
  local before = redis.call('GET', key('call', ARGV[1]))
  if before then return cmsgpack.unpack(before) end
end

local TIME = redis.call('TIME')
local now = tonumber(TIME[1]) + tonumber(TIME[2]) / 1000000
local function stamp(at) return string.format('%.6f', at) end
local changed = false

local FIELDS = {'seq', 'consumer', 'size', 'priority', 'min_version', 'timeout_s', 'state', 'attempt',
  'fence', 'report', 'oldest', 'reason', 'delivery', 'step', 'kept', 'since', 'changed_at', 'staleness'}
local NUMBERS = {seq = 1, size = 1, priority = 1, min_version = 1, timeout_s = 1, attempt = 1, fence = 1,
  oldest = 1, step = 1, since = 1}

-- A rollout without its request, or nil; an empty field is absent.
local function load(id)
  local values = redis.call('HMGET', key('rollout', id), unpack(FIELDS))
  if not values[1] then return nil end
  local r = {id = id}
  for i, name in ipairs(FIELDS) do
    local value = values[i]
    if value and value ~= '' then r[name] = NUMBERS[name] and tonumber(value) or value end
  end
  return r
end

local function count(r, state, sign)
  for _, name in ipairs({r.consumer, ''}) do
    redis.call('HINCRBY', key('groups'), state .. ' ' .. name, sign)
    redis.call('HINCRBY', key('trajectories'), state .. ' ' .. name, sign * r.size)
  end
end

local function tally(name, state, consumer)
  return tonumber(redis.call('HGET', key(name), state .. ' ' .. consumer) or '0')
end

-- Updates the head of a consumer's queue.
local function name_head(consumer)
  local head = redis.call('ZRANGE', key('queue', consumer), 0, 0, 'WITHSCORES')
  if head[1] then
    redis.call('ZADD', key('heads'), head[2], consumer)
  else
    redis.call('ZREM', key('heads'), consumer)
  end
end

-- Priority in [-1000, 1000] and a seq below 2^42 fit into the 53 bits of a score.
local function join_queue(r)
  local rank = (1000 - r.priority) * 4398046511104 + r.seq
  redis.call('ZADD', key('queue', r.consumer), string.format('%.0f', rank), r.id)
  name_head(r.consumer)
end

local ENDED = {consumed = true, failed = true, filtered = true, stale = true, cancelled = true}

local function leave(r)
  local state, consumer, id = r.state, r.consumer, r.id
  redis.call('ZREM', key('state', state), id)
  redis.call('ZREM', key('state', state .. ':' .. consumer), id)
  if state == 'queued' then
    if redis.call('ZREM', key('later'), id) == 0 then
      redis.call('ZREM', key('queue', consumer), id)
      name_head(consumer)
    end
  elseif state == 'leased' then
    redis.call('ZREM', key('leases'), id)
    redis.call('ZREM', key('admitted', consumer), id)
  elseif state == 'ready' then
    redis.call('ZREM', key('oldest', consumer), id)
  elseif state == 'consumed' then
    redis.call('ZREM', key('steps', consumer), id)
    redis.call('ZREM', key('kept', consumer), id)
  end
  if ENDED[state] then redis.call('ZREM', key('ended'), id) end
  count(r, state, -1)
end

local function enter(r)
  local state, consumer, id = r.state, r.consumer, r.id
  redis.call('ZADD', key('state', state), r.seq, id)
  redis.call('ZADD', key('state', state .. ':' .. consumer), r.seq, id)
  if state == 'queued' then
    if r.min_version > 0 then
      redis.call('ZADD', key('later'), r.min_version, id)
    else
      join_queue(r)
    end
  elseif state == 'leased' then
    redis.call('ZADD', key('leases'), stamp(r.expires), id)
    redis.call('ZADD', key('admitted', consumer), r.admitted, id)
  elseif state == 'ready' then
    redis.call('ZADD', key('oldest', consumer), r.oldest, id)
  elseif state == 'consumed' then
    redis.call('ZADD', key('steps', consumer), r.step, id)
    if r.kept then redis.call('ZADD', key('kept', consumer), r.step, id) end
  end
  if ENDED[state] then redis.call('ZADD', key('ended'), stamp(now), id) end
  if state ~= 'queued' and state ~= 'leased' then redis.call('ZREM', key('deadlines'), id) end
  count(r, state, 1)
end

local function log(id, event, detail)
  redis.call('RPUSH', key('events', id), event .. ' ' .. stamp(now) .. ' ' .. (detail or ''))
  changed = true
end

-- One transition: `fields` change with the state.
local function move(r, event, target, detail, fields)
  leave(r)
  local flat = {'state', target, 'changed_at', stamp(now)}
  for name, value in pairs(fields or {}) do
    flat[#flat + 1] = name
    flat[#flat + 1] = value
    if value == '' then value = nil end
    r[name] = NUMBERS[name] and tonumber(value) or value
  end
  redis.call('HSET', key('rollout', r.id), unpack(flat))
  r.state = target
  enter(r)
  log(r.id, event, detail)
end

-- The time to fail counts from now.
local function start_clock(r)
  redis.call('HSET', key('rollout', r.id), 'since', stamp(now))
  if r.timeout_s and (r.state == 'queued' or r.state == 'leased') then
    redis.call('ZADD', key('deadlines'), stamp(now + r.timeout_s), r.id)
  end
end

local function drop_payload(r)
  redis.call('UNLINK', key('payload', r.id))
  redis.call('HSET', key('rollout', r.id), 'kept', '')
end

local function finish(answer)
  if changed then
    redis.call('INCR', key('revision'))
    if ARGV[1] ~= '' then
      redis.call('SET', key('call', ARGV[1]), cmsgpack.pack(answer), 'EX', 60)
    end
  end
  return answer
end
