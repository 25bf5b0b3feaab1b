-- step, checkpoint_step, ids
local step, checkpoint_step = tonumber(ARGV[2]), tonumber(ARGV[3])
local rows, consumers, seen = {}, {}, {}
for i = 4, #ARGV do
  local id = ARGV[i]
  local r = not seen[id] and load(id)
  if r == nil then return {'unknown', id} end
  seen[id] = true
  if r then
    consumers[r.consumer] = true
    if r.state == 'delivered' then
      rows[#rows + 1] = r
    elseif r.state ~= 'consumed' or r.step ~= step then
      return {'illegal', id, r.state .. (r.step and '(' .. r.step .. ')' or '')}
    end
  end
end
for _, r in ipairs(rows) do move(r, 'consume', 'consumed', 'step=' .. step, {step = step}) end
for consumer in pairs(consumers) do
  local kept = key('kept', consumer)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', kept, '-inf', checkpoint_step)) do
    redis.call('ZREM', kept, id)
    drop_payload({id = id})
  end
end
return finish({'ok'})
