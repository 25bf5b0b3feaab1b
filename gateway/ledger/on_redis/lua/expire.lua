local groups = 0
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('deadlines'), '-inf', stamp(now))) do
  local r = load(id)
  local reason = string.format('its timeout_s=%g passed while it was %s', r.timeout_s, r.state)
  move(r, 'time_out', 'failed', reason, {reason = reason})
  groups = groups + 1
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('leases'), '-inf', stamp(now))) do
  local owner = redis.call('HGET', key('rollout', id), 'owner')
  local reason = "its owner '" .. owner .. "' was silent"
  move(load(id), 'requeue', 'queued', reason, {reason = reason})
  groups = groups + 1
end
return finish({'ok', groups})
