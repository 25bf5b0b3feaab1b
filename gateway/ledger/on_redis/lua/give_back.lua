-- consumer, step
local consumer, step = ARGV[2], tonumber(ARGV[3])
local ids = redis.call('ZRANGE', key('state', 'delivered:' .. consumer), 0, -1)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('steps', consumer), '(' .. step, '+inf')) do
  ids[#ids + 1] = id
end
for _, id in ipairs(ids) do
  local r = load(id)
  redis.call('SREM', key('delivery', r.delivery), id)
  local event, target = 'replay', 'queued'
  if r.kept then event, target = 'give_back', 'ready' end
  move(r, event, target, 'checkpoint_step=' .. step,
    {delivery = '', step = '', staleness = '', attempt = 0})
  start_clock(r)
end
return finish({'ok', #ids})
