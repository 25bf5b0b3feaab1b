-- state or '', consumer or '', limit, before or ''
local state, consumer, top = ARGV[2], ARGV[3], '+inf'
local index = key('order')
if state ~= '' then
  index = key('state', consumer == '' and state or state .. ':' .. consumer)
elseif consumer ~= '' then
  index = key('order_of', consumer)
end
if ARGV[5] ~= '' then
  top = redis.call('ZSCORE', key('order'), ARGV[5])
  if not top then return {'unknown', ARGV[5]} end
  top = '(' .. top
end
local rows = {}
for i, id in ipairs(redis.call('ZREVRANGEBYSCORE', index, top, '-inf', 'LIMIT', 0, ARGV[4])) do
  rows[i] = redis.call('HGETALL', key('rollout', id))
end
return {'ok', rows}
