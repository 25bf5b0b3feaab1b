-- place or '', new owner: what a former owner of that place had leased is nobody's
local place = ARGV[2] .. '/'
if place == '/' then return finish({'ok', 0}) end
local groups = 0
for _, id in ipairs(redis.call('ZRANGE', key('leases'), 0, -1)) do
  local owner = redis.call('HGET', key('rollout', id), 'owner')
  if owner ~= ARGV[3] and string.sub(owner, 1, #place) == place then
    local reason = "its owner '" .. owner .. "' was started again"
    move(load(id), 'requeue', 'queued', reason, {reason = reason})
    groups = groups + 1
  end
end
return finish({'ok', groups})
