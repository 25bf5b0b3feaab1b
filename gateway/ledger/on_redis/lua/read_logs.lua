-- after (a seq), number: state, size, staleness and events of that many rollouts, and the last seq
local ids = redis.call('ZRANGEBYSCORE', key('order'), '(' .. ARGV[2], '+inf', 'WITHSCORES',
  'LIMIT', 0, ARGV[3])
local rows = {}
for i = 1, #ids, 2 do
  local fields = redis.call('HMGET', key('rollout', ids[i]), 'state', 'size', 'staleness')
  local events = redis.call('LRANGE', key('events', ids[i]), 0, -1)
  for n, line in ipairs(events) do events[n] = string.match(line, '^%S+') end
  rows[#rows + 1] = {fields[1] or '', fields[2] or '1', fields[3] or '', events}
end
return {'ok', rows, ids[#ids] or ''}
