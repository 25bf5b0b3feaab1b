-- id, changed_at, lost, duplicated, requeues, max_staleness of each rollout
local groups = 0
for i = 2, #ARGV, 6 do
  local r = load(ARGV[i])
  if r and r.changed_at == ARGV[i + 1] then
    redis.call('HINCRBY', key('forgotten'), r.state, r.size)
    for n, name in ipairs({'lost', 'duplicated', 'requeues'}) do
      redis.call('HINCRBY', key('findings'), name, ARGV[i + 1 + n])
    end
    local most = tonumber(redis.call('HGET', key('findings'), 'max_staleness') or '0')
    redis.call('HSET', key('findings'), 'max_staleness', math.max(most, tonumber(ARGV[i + 5])))
    for _, name in ipairs({'rollout', 'payload', 'events'}) do redis.call('UNLINK', key(name, r.id)) end
    if r.delivery then redis.call('SREM', key('delivery', r.delivery), r.id) end
    for _, index in ipairs({key('order'), key('order_of', r.consumer), key('state', r.state),
      key('state', r.state .. ':' .. r.consumer), key('steps', r.consumer), key('ended')}) do
      redis.call('ZREM', index, r.id)
    end
    groups = groups + 1
    changed = true
  end
end
return finish({'ok', groups})
