-- lease_s, then id and fence of each lease
local expires = stamp(now + tonumber(ARGV[2]))
local lost = {}
for i = 3, #ARGV, 2 do
  local held = redis.call('HMGET', key('rollout', ARGV[i]), 'state', 'fence')
  if held[1] == 'leased' and held[2] == ARGV[i + 1] then
    redis.call('ZADD', key('leases'), expires, ARGV[i])
  else
    lost[#lost + 1] = ARGV[i] .. '#' .. ARGV[i + 1]
  end
end
return {'ok', lost}
