-- consumer, reason; answers trajectories
local trajectories = 0
for _, state in ipairs({'queued', 'leased', 'ready', 'delivered'}) do
  for _, id in ipairs(redis.call('ZRANGE', key('state', state .. ':' .. ARGV[2]), 0, -1)) do
    local r = load(id)
    move(r, 'cancel', 'cancelled', ARGV[3], {reason = ARGV[3]})
    drop_payload(r)
    trajectories = trajectories + r.size
  end
end
return finish({'ok', trajectories})
