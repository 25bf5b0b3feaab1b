-- older_than_s, number: id, changed_at, state, size, staleness and events of what may be forgotten
local ids = redis.call('ZRANGEBYSCORE', key('ended'), '-inf', stamp(now - tonumber(ARGV[2])))
local rows = {}
for _, id in ipairs(ids) do
  if #rows == tonumber(ARGV[3]) then break end
  local r = load(id)
  -- What is consumed and has its payload may be given back still.
  if not (r.state == 'consumed' and r.kept) then
    local events = redis.call('LRANGE', key('events', id), 0, -1)
    for n, line in ipairs(events) do events[n] = string.match(line, '^%S+') end
    rows[#rows + 1] = {id, r.changed_at, r.state, r.size, r.staleness or '', events}
  end
end
return {'ok', rows}
