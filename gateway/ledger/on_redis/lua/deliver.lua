-- delivery, count, consumer, version, max_staleness or '', version of the learner
local delivery, number, consumer = ARGV[2], tonumber(ARGV[3]), ARGV[4]
local version, max_staleness, learner = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local before = delivered_before(delivery)
if before[1] then
  for _, r in ipairs(before) do
    if r.consumer ~= consumer then return {'used'} end
  end
  return repeat_delivery(before)
end
local due, dropped = max_staleness and version - max_staleness, 0
if due then
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('oldest', consumer), '-inf', '(' .. learner - max_staleness)) do
    local r = load(id)
    local reason = 'version ' .. learner .. ' is too far from version ' .. r.oldest
    move(r, 'drop', 'stale', 'version=' .. learner .. ' oldest_version=' .. r.oldest, {reason = reason})
    drop_payload(r)
    dropped = dropped + r.size
  end
  if dropped > 0 then redis.call('INCR', key('revision')) end
end
local num_ready = tally('groups', 'ready', consumer)
if num_ready < number then return {'none', num_ready, dropped, 0} end
if due and redis.call('ZCOUNT', key('admitted', consumer), '-inf', due) > 0 then
  return {'none', num_ready, dropped, 1}
end
local rows = {}
if due then
  for _, id in ipairs(redis.call('ZRANGE', key('oldest', consumer), 0, -1)) do
    rows[#rows + 1] = load(id)
  end
  table.sort(rows, function(a, b)
    if a.oldest ~= b.oldest then return a.oldest < b.oldest end
    return a.seq < b.seq
  end)
  while #rows > number do table.remove(rows) end
else
  for _, id in ipairs(redis.call('ZRANGE', key('state', 'ready:' .. consumer), 0, number - 1)) do
    rows[#rows + 1] = load(id)
  end
end
return give_out(rows, delivery, learner, num_ready, dropped)
