-- max_queued, max_queued_per_consumer or '', then 7 values per request:
-- id, consumer, size, priority, min_version, timeout_s or '', request
local max_queued, max_each = tonumber(ARGV[2]), tonumber(ARGV[3])
local new, is_new, added, added_by = {}, {}, 0, {}
for i = 4, #ARGV, 7 do
  local id, consumer, size, text = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 6]
  local known = is_new[id] or redis.call('HGET', key('rollout', id), 'request')
  if known and known ~= text then return {'differs', id, known} end
  if known then
    new[#new + 1] = 0
  else
    is_new[id] = text
    new[#new + 1] = 1
    added = added + size
    added_by[consumer] = (added_by[consumer] or 0) + size
  end
end
if added > 0 then
  local queued = tally('trajectories', 'queued', '') + added
  if queued > max_queued then return {'full', queued, ''} end
end
if max_each then
  for consumer, size in pairs(added_by) do
    local queued = tally('trajectories', 'queued', consumer) + size
    if queued > max_each then return {'full', queued, consumer} end
  end
end
for n, flag in ipairs(new) do
  if flag == 1 then
    local i = 4 + (n - 1) * 7
    local id, consumer = ARGV[i], ARGV[i + 1]
    local r = {id = id, consumer = consumer, size = tonumber(ARGV[i + 2]),
      priority = tonumber(ARGV[i + 3]), min_version = tonumber(ARGV[i + 4]),
      timeout_s = tonumber(ARGV[i + 5]), state = 'queued', seq = redis.call('INCR', key('seq'))}
    redis.call('HSET', key('rollout', id), 'seq', r.seq, 'consumer', consumer, 'size', r.size,
      'priority', r.priority, 'min_version', r.min_version, 'timeout_s', ARGV[i + 5],
      'request', ARGV[i + 6], 'state', 'queued', 'attempt', 0, 'fence', 0,
      'submitted_at', stamp(now), 'changed_at', stamp(now))
    redis.call('ZADD', key('order'), r.seq, id)
    redis.call('ZADD', key('order_of', consumer), r.seq, id)
    enter(r)
    start_clock(r)
    log(id, 'submit')
  end
end
return finish({'ok', new})
